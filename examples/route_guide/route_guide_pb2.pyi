from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Point(_message.Message):
    __slots__ = ("latitude", "longitude")
    LATITUDE_FIELD_NUMBER: _ClassVar[int]
    LONGITUDE_FIELD_NUMBER: _ClassVar[int]
    latitude: int
    longitude: int
    def __init__(self, latitude: _Optional[int] = ..., longitude: _Optional[int] = ...) -> None: ...

class Rectangle(_message.Message):
    __slots__ = ("corner", "opposite")
    CORNER_FIELD_NUMBER: _ClassVar[int]
    OPPOSITE_FIELD_NUMBER: _ClassVar[int]
    corner: Point
    opposite: Point
    def __init__(self, corner: _Optional[_Union[Point, _Mapping]] = ..., opposite: _Optional[_Union[Point, _Mapping]] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("name", "location")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    location: Point
    def __init__(self, name: _Optional[str] = ..., location: _Optional[_Union[Point, _Mapping]] = ...) -> None: ...

class RouteNote(_message.Message):
    __slots__ = ("location", "text")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    location: Point
    text: str
    def __init__(self, location: _Optional[_Union[Point, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class RouteSummary(_message.Message):
    __slots__ = ("num_points", "num_features", "metres", "seconds")
    NUM_POINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    METRES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_points: int
    num_features: int
    metres: int
    seconds: float
    def __init__(self, num_points: _Optional[int] = ..., num_features: _Optional[int] = ..., metres: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
