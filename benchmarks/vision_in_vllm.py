"""The chats with pictures of `benchmarks.vision` in vLLM, in its own process and without HTTP.

    PYTHONPATH=where/vllm/is python -m benchmarks.vision_in_vllm --model qwen2.5-vl-7b --json figures.json

`benchmarks.vision` calls it. vLLM decodes the same picture files and gets token ids of the rest. Times of first tokens
are those of its own engine, without the way back to the caller. Neither prefixes nor processed pictures are cached.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from benchmarks.in_vllm import MEMORY_SHARE, MOST_REQUESTS, QUIET
from benchmarks.vision_work import LONGEST, Answered, PictureChat, best, chats, figures, measured_arguments
from legato.modelfiles.shapes import write_shape

# Of its HTTP server on such a card.
STEP_TOKENS = 8192


class SeeingVLLM:
    def __init__(self, folder: Path) -> None:
        # Imported late: `--help` must work without it.
        self._vllm: Any = import_module("vllm")
        self.version: str = self._vllm.__version__
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._engine = self._vllm.LLM(
            model=str(folder),
            load_format="dummy",
            max_model_len=LONGEST,
            max_num_seqs=MOST_REQUESTS,
            max_num_batched_tokens=STEP_TOKENS,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 1, "video": 0},
            mm_processor_cache_gb=0,
            skip_mm_profiling=True,
            disable_log_stats=False,  # they have the times of first tokens
            seed=0,
        )

    def run(self, work: Sequence[PictureChat], new: int) -> dict[str, Any]:
        """All chats at once, greedy, every answer of `new` tokens."""
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        started = time.monotonic()
        answers = self._engine.generate([self._prompt(chat) for chat in work], params, use_tqdm=False)
        end = time.monotonic() - started
        return figures([self._answered(answer, started, end) for answer in answers], new)

    def _prompt(self, chat: PictureChat) -> dict[str, Any]:
        picture = Image.open(io.BytesIO(chat.data)).convert("RGB")
        ids = self._tokenizer.encode(chat.prompt, add_special_tokens=False).ids
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}

    @staticmethod
    def _answered(answer: Any, started: float, end: float) -> Answered:
        """Of the same clock: that of the system."""
        first = float(answer.metrics.first_token_ts) - started
        return Answered(first, end, len(answer.prompt_token_ids), len(answer.outputs[0].token_ids))


def measured(folder: Path, count: int, side: int, new: int, repeat: int) -> dict[str, Any]:
    started = time.perf_counter()
    engine = SeeingVLLM(folder)
    engine.run(chats(1, side, 0), 1)
    first_token = time.perf_counter() - started
    runs = []
    for number in range(1, repeat + 1):
        runs.append(engine.run(chats(count, side, number), new))
        print(f"run {number}: {runs[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    return {"vllm": engine.version, "first_token_seconds": first_token, **best(runs)}


def main() -> None:
    given = measured_arguments(__doc__)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as place:
        folder = write_shape(given.model, Path(place) / given.model)
        report = measured(folder, given.requests, given.side, given.new, given.repeat)
    given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
