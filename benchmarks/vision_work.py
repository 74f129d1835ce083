"""The work of `benchmarks.vision`: chats of one picture and a sentence, the same for every engine."""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from legato.benchmark.report import Summary
from legato.benchmark.serve.work import WORDS
from legato.modelfiles.shapes import SHAPES

# Of the sentence after the picture.
NUM_WORDS = 16
QUALITY = 90
# Side of the coarse noise that a picture is enlarged from: a photograph's size as JPEG, which plain noise has not.
COARSE = 32
# A prompt and its answer. The engines allocate the cache on demand, so that it costs nothing.
LONGEST = 4096
VISION_SHAPES = sorted(name for name, shape in SHAPES.items() if "vision_config" in shape)


@dataclass(frozen=True)
class PictureChat:
    data: bytes  # JPEG
    text: str

    @property
    def prompt(self) -> str:
        """As the chat template of the shapes renders it."""
        return f"user\n<|vision_start|><|image_pad|><|vision_end|>{self.text}\nassistant\n"


@dataclass(frozen=True)
class Answered:
    """One answer: seconds to its first token and to its end, tokens of its prompt, and how many it has."""

    first: float
    end: float
    num_in: int
    num_out: int


def picture(side: int, *seeds: int) -> bytes:
    coarse = np.random.default_rng(seeds).integers(0, 256, (COARSE, COARSE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def chats(count: int, side: int, run: int) -> list[PictureChat]:
    """Every run has pictures of its own, so that no cache has seen any of them. Run 0 is before those that count."""
    words, rng = WORDS.split(), random.Random(run)
    return [
        PictureChat(picture(side, run, number), " ".join(rng.choices(words, k=NUM_WORDS))) for number in range(count)
    ]


def figures(answers: Sequence[Answered], new: int) -> dict[str, Any]:
    """Of one run, whose requests were all sent at once."""
    lengths = [answer.num_out for answer in answers]
    assert lengths == [new] * len(answers), f"answers of {sorted(set(lengths))} tokens instead of {new}"
    seconds, num_out = max(answer.end for answer in answers), sum(lengths)
    ttft = Summary.in_ms(answer.first for answer in answers)
    assert ttft is not None
    return {
        "seconds": seconds,
        "num_in": sum(answer.num_in for answer in answers),
        "num_out": num_out,
        "out_per_second": num_out / seconds,
        "ttft_ms": {"average": ttft.average, "p50": ttft.p50, "p95": ttft.p95, "highest": ttft.highest},
    }


def best(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"best": min(runs, key=lambda run: float(run["seconds"])), "runs": list(runs)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=VISION_SHAPES, default="qwen2.5-vl-7b")
    parser.add_argument("--requests", type=int, default=32, help="sent at once")
    parser.add_argument("--side", type=int, default=1024, help="of a picture, in pixels")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3, help="runs; the fastest counts")


def measured_arguments(description: str | None) -> argparse.Namespace:
    """Of a program that `benchmarks.vision` starts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    return parser.parse_args()
