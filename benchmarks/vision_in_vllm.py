"""The chats with pictures of `benchmarks.vision` in vLLM, in its own process and without HTTP.

    PYTHONPATH=where/vllm/is python -m benchmarks.vision_in_vllm --model qwen2.5-vl-7b --json figures.json

`benchmarks.vision` calls it. vLLM gets the bytes of a picture and token ids of the rest, and streams as for its HTTP
server, whose number of tokens in a step it has too. Nothing is cached, neither prefixes nor processed pictures.
"""

from __future__ import annotations

import asyncio
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

STEP_TOKENS = 8192


class StreamingVLLM:
    def __init__(self, folder: Path) -> None:
        # Imported late: `--help` must work without it.
        self._vllm: Any = import_module("vllm")
        self.version: str = self._vllm.__version__
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = self._vllm.AsyncEngineArgs(
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
            seed=0,
        )
        self._engine = self._vllm.AsyncLLMEngine.from_engine_args(settings)

    async def run(self, work: Sequence[PictureChat], new: int, name: str) -> dict[str, Any]:
        """All chats at once."""
        started = time.perf_counter()
        answers = [self._answered(chat, new, f"{name}-{number}", started) for number, chat in enumerate(work)]
        return figures(await asyncio.gather(*answers), new)

    async def _answered(self, chat: PictureChat, new: int, name: str, started: float) -> Answered:
        params = self._vllm.SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        picture = Image.open(io.BytesIO(chat.data)).convert("RGB")
        ids = self._tokenizer.encode(chat.prompt, add_special_tokens=False).ids
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}
        seen: list[Any] = []
        first = 0.0
        async for answer in self._engine.generate(prompt, params, name):
            first = first or time.perf_counter() - started
            seen[:] = [answer]
        assert seen, "vLLM returned no answer"
        end, (last,) = time.perf_counter() - started, seen
        return Answered(first, end, len(last.prompt_token_ids), len(last.outputs[0].token_ids))

    def close(self) -> None:
        self._engine.shutdown()


async def measured(folder: Path, count: int, side: int, new: int, repeat: int) -> dict[str, Any]:
    started = time.perf_counter()
    engine = StreamingVLLM(folder)
    try:
        await engine.run(chats(1, side, 0), 1, "first")
        first_token = time.perf_counter() - started
        runs = []
        for number in range(1, repeat + 1):
            runs.append(await engine.run(chats(count, side, number), new, str(number)))
            print(f"run {number}: {runs[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    finally:
        engine.close()
    return {"vllm": engine.version, "first_token_seconds": first_token, **best(runs)}


def main() -> None:
    given = measured_arguments(__doc__)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as place:
        folder = write_shape(given.model, Path(place) / given.model)
        report = asyncio.run(measured(folder, given.requests, given.side, given.new, given.repeat))
    given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
