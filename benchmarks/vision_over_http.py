"""Chats with pictures on a Legato server, over HTTP as clients send them.

    python -m benchmarks.vision_over_http --model qwen2.5-vl-7b --json figures.json

`benchmarks.vision` calls it. Starts `text-generation-launcher` on a shape without weights, without drafts and else with
its defaults.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import HOST, launched, leave_nothing_behind
from benchmarks.vision_work import LONGEST, Answered, PictureChat, best, chats, figures, measured_arguments
from legato.benchmark.serve.client import LoadClient
from legato.benchmark.serve.work import LoadRequest, Target
from legato.benchmark.shard import WITHOUT_DRAFTS
from legato.modelfiles.shapes import write_shape


@dataclass(frozen=True)
class PictureTarget(Target):
    """A server that is sent chats whose first part is a picture: the prompts here are its URLs, and their sentences."""

    def body(self, request: LoadRequest) -> dict[str, Any]:
        assert isinstance(request.prompt, str)
        url, _, text = request.prompt.partition(" ")
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        return super().body(request) | {"messages": [{"role": "user", "content": parts}]}


async def answered(client: LoadClient, chat: PictureChat, new: int, started: float) -> Answered:
    url = f"data:image/jpeg;base64,{base64.b64encode(chat.data).decode()}"
    record = await client.send(LoadRequest(f"{url} {chat.text}", new), started)
    if record.error is not None or record.ttft is None or record.num_prompt is None:
        sys.exit(f"error: {record.error}: {record.detail}")
    return Answered(record.ttft, record.latency, record.num_prompt, record.num_tokens)


async def run(port: int, work: Sequence[PictureChat], new: int) -> dict[str, Any]:
    """All chats at once, each on a connection of its own."""
    started = time.perf_counter()
    client = LoadClient(PictureTarget(HOST, port, False, "chat", model="tgi"), started)
    answers = await asyncio.gather(*(answered(client, chat, new, started) for chat in work))
    client.close()
    return figures(answers, new)


def main() -> None:
    given = measured_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model-id", str(write_shape(given.model, Path(folder) / given.model)), "--load-format", "dummy"]
        started = time.perf_counter()
        with launched(*words, WITHOUT_DRAFTS, "--max-total-tokens", str(LONGEST)) as (port, _):
            asyncio.run(run(port, chats(1, given.side, 0), 1))
            first_token = time.perf_counter() - started
            runs = []
            for number in range(1, given.repeat + 1):
                runs.append(asyncio.run(run(port, chats(given.requests, given.side, number), given.new)))
                print(f"run {number}: {runs[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    given.json.write_text(
        json.dumps({"speculate": 0, "first_token_seconds": first_token, **best(runs)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    leave_nothing_behind()
    main()
