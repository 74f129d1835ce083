"""Pictures the whole way: over HTTP into a router, through it to a shard, and back as the tokens of transformers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.sockets import free_port
from legato.modelfiles.files import ModelFiles
from legato.vision.rules import Size, image_rules
from tests.integration.client import Client
from tests.integration.processes import launched
from tests.models import tiny_cross as cross
from tests.models import tiny_gemma_vision as gemma
from tests.models import tiny_vision as tiny

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

NUM_TOKENS = 16
TOLERANCE = 1e-3  # of a logprob
WIDE, TALL = tiny.picture(130, 90, 1), tiny.picture(60, 200, 2)

Parts = tuple[str | bytes, ...]  # of a message: texts and pictures


def chat_text(folder: Path, parts: Parts) -> str:
    from transformers import PreTrainedTokenizerFast

    content = [dict(type="text", text=part) if isinstance(part, str) else dict(type="image") for part in parts]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return str(text)


def llava_prompt(folder: Path, text: str, images: list[bytes]) -> list[int]:
    """By the processor that is saved with the model."""
    from transformers import AutoProcessor

    ids: list[int] = AutoProcessor.from_pretrained(folder)(images=tiny.decoded(images), text=[text])["input_ids"][0]
    return ids


def qwen_prompt(folder: Path, text: str, images: list[bytes]) -> list[int]:
    """A cell of four patches is a token. (The whole processor would ask for torchvision, because of films.)"""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(tiny.decoded(images), return_tensors="np")
    counts = iter(int(rows * columns) // 4 for _, rows, columns in seen["image_grid_thw"])
    ids = ModelFiles.open(folder).tokenizer().encode(text).ids
    return [number for number in ids for _ in range(next(counts) if number == tiny.IMAGE else 1)]


def gemma3_prompt(folder: Path, text: str, images: list[bytes]) -> list[int]:
    """As its processor writes it: empty lines around each image."""
    text = text.replace("<start_of_image>", "\n\n<start_of_image>\n\n")
    spelled = {gemma.FIRST: [gemma.FIRST, *[tiny.IMAGE] * gemma.NUM_TOKENS, gemma.LAST]}
    ids = ModelFiles.open(folder).tokenizer().encode(text).ids
    return [token for number in ids for token in spelled.get(number, [number])]


def paligemma_prompt(folder: Path, text: str, images: list[bytes]) -> list[int]:
    """As its processor writes it: the first token of text is behind the last image, and a line ends the prompt."""
    end = text.rfind("<image>") + len("<image>")
    ids = ModelFiles.open(folder).tokenizer().encode(f"{text[:end]}<s>{text[end:]}\n", add_special_tokens=False).ids
    return [number for number in ids for _ in range(64 if number == tiny.IMAGE else 1)]


def mllama_prompt(folder: Path, text: str, images: list[bytes]) -> list[int]:
    """Slots for the tiles of the pictures, 17 each, up to a multiple of 128, and the text as it is."""
    sizes = [Size(picture.height, picture.width) for picture in tiny.decoded(images)]
    rules = image_rules(ModelFiles.open(folder))
    assert rules is not None
    ids = ModelFiles.open(folder).tokenizer().encode(text).ids
    return rules.placed(ids, [rules.num_tokens(size) for size in sizes])[0]


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    prompt: Callable[[Path, str, list[bytes]], list[int]]
    mark: str  # of a picture in a text
    oracle: Callable[[Path, list[int], list[bytes], int], tuple[list[int], torch.Tensor]]


FAMILIES = {
    "gemma3": Family(gemma.tiny_gemma3_images, gemma3_prompt, "<start_of_image>", gemma.gemma3_oracle),
    "mllama": Family(cross.tiny_mllama, mllama_prompt, "<|image|>", cross.mllama_oracle),
    "paligemma": Family(gemma.tiny_paligemma, paligemma_prompt, "<image>", gemma.paligemma_oracle),
    "llava-next": Family(tiny.tiny_llava_next, llava_prompt, "<image>", tiny.llava_oracle),
    "qwen2-vl": Family(
        tiny.tiny_qwen2_vl, qwen_prompt, "<|vision_start|><|image_pad|><|vision_end|>", tiny.qwen_oracle
    ),
}


@dataclass(frozen=True)
class Served:
    folder: Path
    family: Family
    client: Client

    def chat(self, *parts: str | bytes) -> dict[str, Any]:
        content = [{"type": "text", "text": part} if isinstance(part, str) else image(part) for part in parts]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = self.client.post("/v1/chat/completions", {**body, "logprobs": True, "ignore_eos": True})
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json()
        return found

    def expected(self, text: str, *images: bytes) -> tuple[int, list[int], list[float]]:
        """The number of tokens of a prompt, those that are generated from it, and their logprobs."""
        prompt = self.family.prompt(self.folder, text, list(images))
        tokens, logits = self.family.oracle(self.folder, prompt, list(images), NUM_TOKENS)
        return len(prompt), tokens, logits.log_softmax(-1).amax(-1).tolist()


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


SERVERS = [
    pytest.param(("llava-next", 1), id="llava-next-1"),
    pytest.param(("qwen2-vl", 1), id="qwen2-vl-1"),
    pytest.param(("gemma3", 1), id="gemma3-1", marks=pytest.mark.shards),
    pytest.param(("mllama", 1), id="mllama-1", marks=pytest.mark.shards),
    pytest.param(("paligemma", 1), id="paligemma-1", marks=pytest.mark.shards),
    pytest.param(("llava-next", 2), id="llava-next-2", marks=pytest.mark.shards),
    pytest.param(("qwen2-vl", 2), id="qwen2-vl-2", marks=pytest.mark.shards),
]


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, world_size = request.param
    folder = FAMILIES[name].make(tmp_path_factory.mktemp(name))
    limits = ["--max-total-tokens=768", "--max-concurrent-requests=8", "--dtype=float32"]  # by default packed on a CPU
    shards = [f"--num-shard={world_size}", f"--master-port={free_port()}"]
    with launched(tmp_path_factory.mktemp("server"), folder, *limits, *shards) as server:
        yield Served(folder, FAMILIES[name], server.client)


@pytest.mark.parametrize("parts", [("see ", WIDE, "what?"), (TALL, "and", WIDE)], ids=["one", "two"])
def test_a_chat_has_the_tokens_of_transformers(served: Served, parts: Parts) -> None:
    answer = served.chat(*parts)
    images = [part for part in parts if isinstance(part, bytes)]
    num_prompt, tokens, logprobs = served.expected(chat_text(served.folder, parts), *images)
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=TOLERANCE)
    assert choice["message"]["content"] == ModelFiles.open(served.folder).tokenizer().decode(tokens)


def test_a_picture_in_a_native_prompt_is_seen_as_transformers_sees_it(served: Served) -> None:
    sent = f"see ![]({image(WIDE)['image_url']['url']}) what?"
    asked = dict(max_new_tokens=NUM_TOKENS, details=True, decoder_input_details=True, ignore_eos=True)
    details = served.client.generate(sent, **asked)["details"]
    _, tokens, _ = served.expected(f"see {served.family.mark} what?", WIDE)
    assert [token["id"] for token in details["tokens"]] == tokens
    assert details["prefill"] == []
