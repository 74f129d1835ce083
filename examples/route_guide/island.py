"""The map, independent of gRPC: testable without a network."""

from __future__ import annotations

import json
import math
from pathlib import Path

import route_guide_pb2 as pb

ISLAND = Path(__file__).with_name("island.json")
MICRODEGREES = 1_000_000
EARTH_RADIUS_METRES = 6_371_000

Place = tuple[int, int]  # a point as a dictionary key: messages are mutable and not hashable


def load_features(path: Path = ISLAND) -> list[pb.Feature]:
    places = json.loads(path.read_text(encoding="utf-8"))
    return [pb.Feature(name=p["name"], location=point(p["latitude"], p["longitude"])) for p in places]


def point(latitude: float, longitude: float) -> pb.Point:
    return pb.Point(latitude=round(latitude * MICRODEGREES), longitude=round(longitude * MICRODEGREES))


def place(point: pb.Point) -> Place:
    return point.latitude, point.longitude


def is_on_earth(point: pb.Point) -> bool:
    return abs(point.latitude) <= 90 * MICRODEGREES and abs(point.longitude) <= 180 * MICRODEGREES


def contains(rectangle: pb.Rectangle, point: pb.Point) -> bool:
    south, north = sorted((rectangle.corner.latitude, rectangle.opposite.latitude))
    west, east = sorted((rectangle.corner.longitude, rectangle.opposite.longitude))
    return south <= point.latitude <= north and west <= point.longitude <= east


def metres_between(start: pb.Point, end: pb.Point) -> float:
    """Haversine formula, which unlike the law of cosines is exact for short distances."""
    north_1, east_1 = (math.radians(x / MICRODEGREES) for x in place(start))
    north_2, east_2 = (math.radians(x / MICRODEGREES) for x in place(end))
    half_chord = math.sin((north_2 - north_1) / 2) ** 2
    half_chord += math.cos(north_1) * math.cos(north_2) * math.sin((east_2 - east_1) / 2) ** 2
    return 2 * EARTH_RADIUS_METRES * math.asin(math.sqrt(half_chord))
