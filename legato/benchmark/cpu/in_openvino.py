"""Runs workloads in OpenVINO GenAI. A program for OpenVINO's own environment, which has no Legato.

Reads JSON lines and answers each with one: first the model, answered with OpenVINO's version once it is loaded, then
runs, answered with the seconds that each took and, for each of its requests, the seconds from its submission to each of
its tokens. Ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from importlib import import_module
from typing import Any


class Pipeline:
    """One request after the other, or several at once: OpenVINO's continuous batching, driven step by step."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._genai, self._openvino = import_module("openvino_genai"), import_module("openvino")
        self._numpy = import_module("numpy")
        config = self._genai.SchedulerConfig()
        config.cache_size = work["cache_gb"]
        config.max_num_seqs = work["max_streams"]
        config.enable_prefix_caching = True
        self._pipeline = self._genai.ContinuousBatchingPipeline(work["model"], config, "CPU")
        self._num_sent = 0

    def _send(self, prompt: list[int], new_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        self._num_sent += 1
        return self._pipeline.add_request(self._num_sent, ids, config)

    def run(self, prompts: list[list[int]], streams: int, new_tokens: int) -> dict[str, Any]:
        """Seconds of the whole, and of every token of every request."""
        waiting = deque(prompts)
        running: list[tuple[Any, float, list[float]]] = []
        finished: list[list[float]] = []
        started = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < streams:
                running.append((self._send(waiting.popleft(), new_tokens), time.perf_counter(), []))
            self._pipeline.step()
            now, still = time.perf_counter(), []
            for handle, sent, times in running:
                if handle.can_read():
                    times += [now - sent] * sum(len(part.generated_ids) for part in handle.read().values())
                if len(times) < new_tokens:
                    still.append((handle, sent, times))
                else:
                    finished.append(times)
            running = still
        return {"seconds": time.perf_counter() - started, "times": finished}


def main() -> None:
    pipeline = Pipeline(json.loads(sys.stdin.readline()))
    print(json.dumps({"version": import_module("openvino_genai").__version__}), flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        print(json.dumps(pipeline.run(run["prompts"], run["streams"], run["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
