"""Whether a request ever gets a token of another adapter: many requests against models with the adapters merged.

    python -m benchmarks.lora_tokens --requests 10000

A small Llama with random weights in float32, and 64 adapters of it of ranks 1 to 64, of which the device holds half at
a time. A shard that takes adapters answers requests of all of them and of none, in no order and 256 at a time, with
CUDA graphs where there is a GPU. What they must say is what transformers' model says with the adapter's matrices added
to its weights. Where that has two tokens of equal logits, to a thousandth, either is right and the rest of the answer
is not compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.adapters import Answers, opened, shapes_of, write_adapter
from legato.kernels.lora.pages import PAGE_RANKS
from legato.modelfiles.shapes import SHAPES, write_shape
from legato.scheduling.state import GenerationRequest

SHAPE = "tiny"
RANKS = (1, 8, 16, 24, 33, 64)
NUM_ADAPTERS, NUM_PROMPTS, NUM_TOKENS, NUM_ROWS = 64, 6, 12, 256
PROMPT_LEN = 24
# Of adapters' numbers: as large as changes every answer.
SIZE = 0.2
EQUAL = 1e-3


def write_model(folder: Path) -> Path:
    """Random weights in transformers' layout."""
    config = SHAPES[SHAPE]
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes = {f"{name}.weight": shape for name, shape in shapes_of(config, []).items()}
    shapes |= {"model.embed_tokens.weight": (vocab_size, hidden), "lm_head.weight": (vocab_size, hidden)}
    tensors = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    layers = [f"model.layers.{number}" for number in range(config["num_hidden_layers"])]
    norms = [f"{layer}.{name}" for layer in layers for name in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}
    write_shape(SHAPE, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Merged:
    """Transformers' model with one adapter at a time in its weights."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval().to(device)
        self._device = device
        self._weights = dict(self._model.named_parameters())
        self._base = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def use(self, adapter: Path | None) -> None:
        for name, weight in self._base.items():
            self._weights[name].copy_(weight)
        tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors", device=self._device)
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):  # alpha is the rank: the scale is 1
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace("lora_A", "lora_B")]
                self._weights[f"{module}.weight"] += (b.double() @ a.double()).float()

    @torch.inference_mode()
    def answers(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[int]]:
        """What follows prompts of the same length, greedily, and how many tokens of each answer are beyond doubt."""
        ids = torch.tensor(prompts, device=self._device)
        sure = torch.full((len(prompts),), num_tokens, device=self._device)
        for place in range(num_tokens):
            best = self._model(ids, use_cache=False).logits[:, -1].topk(2)
            is_close = best.values[:, 0] - best.values[:, 1] < EQUAL
            sure = torch.where(is_close, sure.clamp(max=place), sure)
            ids = torch.cat((ids, best.indices[:, :1]), dim=1)
        return ids[:, len(prompts[0]) :].tolist(), sure.tolist()


@dataclass(frozen=True)
class Expected:
    """By adapter, of which the first is none, and prompt: the answer, and how many of its tokens are beyond doubt."""

    answers: list[list[list[int]]]
    sure: list[list[int]]

    @classmethod
    def compute(cls, base: Path, adapters: Sequence[Path], prompts: list[list[int]]) -> Expected:
        merged = Merged(base, "cuda" if torch.cuda.is_available() else "cpu")
        found = cls([], [])
        for adapter in (None, *adapters):
            merged.use(adapter)
            answers, sure = merged.answers(prompts, NUM_TOKENS)
            found.answers.append(answers)
            found.sure.append(sure)
        return found

    @property
    def share_of_different(self) -> float:
        """Of the answers that all adapters give to all prompts: so one of another adapter would be noticed."""
        texts = [tuple(answer) for answers in self.answers for answer in answers]
        return len(set(texts)) / len(texts)


async def served(base: Path, arguments: Sequence[str], todo: list[tuple[int, list[int]]]) -> list[list[int]]:
    """What a shard answers to prompts of adapters, given by their numbers."""
    async with opened(str(base), NUM_ROWS, arguments) as shard:
        requests = [
            GenerationRequest(next(shard.request_ids), prompt, NUM_TOKENS, ignore_eos=True, adapter=adapter)
            for adapter, prompt in todo
        ]
        answers = Answers({request.id: [] for request in requests})
        for request in requests:
            shard.loop.submit(request, answers)  # type: ignore[arg-type]
        await answers.done
    return [answers.tokens[request.id] for request in requests]


async def compare_tokens(folder: Path, num_requests: int, num_adapters: int = NUM_ADAPTERS) -> dict[str, Any]:
    torch.manual_seed(20)
    started, rng, config = time.monotonic(), random.Random(20), SHAPES[SHAPE]
    base, shapes = write_model(folder / "base"), shapes_of(config, [])
    ranks = [RANKS[number % len(RANKS)] for number in range(num_adapters)]
    adapters = [
        write_adapter(folder / f"merged-{number}", shapes, rank, size=SIZE / rank**0.25, dtype=torch.float32)
        for number, rank in enumerate(ranks)
    ]
    prompts = [[rng.randrange(3, config["vocab_size"]) for _ in range(PROMPT_LEN)] for _ in range(NUM_PROMPTS)]
    expected = Expected.compute(base, adapters, prompts)
    num_pages = max(sum(-(-rank // PAGE_RANKS) for rank in ranks) // 2, max(ranks) // PAGE_RANKS)
    arguments = [
        "--dtype=float32",
        "--lora-adapters=" + ",".join(f"a{number}={path}" for number, path in enumerate(adapters)),
        f"--lora-device-ranks={num_pages * PAGE_RANKS}",
        f"--lora-max-rank={max(ranks)}",
    ]
    chosen = [(rng.randrange(num_adapters + 1), rng.randrange(NUM_PROMPTS)) for _ in range(num_requests)]
    found = await served(base, arguments, [(adapter, prompts[prompt]) for adapter, prompt in chosen])
    num_sure = [expected.sure[adapter][prompt] for adapter, prompt in chosen]
    wrong = sum(
        tokens[:count] != expected.answers[adapter][prompt][:count]
        for tokens, count, (adapter, prompt) in zip(found, num_sure, chosen, strict=True)
    )
    return {
        "requests": num_requests,
        "adapters": num_adapters,
        "ranks": sorted(set(ranks)),
        "tokens": num_requests * NUM_TOKENS,
        "tokens_compared": sum(num_sure),
        "different_answers": round(expected.share_of_different, 4),
        "requests_with_wrong_tokens": wrong,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, default=NUM_ADAPTERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legato-lora-") as folder:
        found = asyncio.run(compare_tokens(Path(folder), options.requests, options.adapters))
    print(json.dumps(found, indent=1))
    raise SystemExit(found["requests_with_wrong_tokens"] > 0)


if __name__ == "__main__":
    main()
