"""Pictures without a router: TGI's unary calls bring them in chunks, and a shard reads and places them itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.server.loading import LoadedModel, load
from tests.models import tiny_vision as tiny
from tests.models.test_vision import make
from tests.server.shard import OPTIONS, Log, finish, load_model, prefill, refusal, serving, warmup
from tests.tiny_models import tiny_llama

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

NUM_TOKENS = 12
WIDE, TALL = tiny.picture(130, 90, 1), tiny.picture(60, 200, 2)
STOPPING = pb.StoppingCriteriaParameters(max_new_tokens=NUM_TOKENS, ignore_eos_token=True)


def chunk(part: str | bytes) -> pb.InputChunk:
    if isinstance(part, str):
        return pb.InputChunk(text=part)
    return pb.InputChunk(image=pb.Image(data=part, mimetype="image/png"))


def request(number: int, *parts: str | bytes, **more: Any) -> pb.Request:
    """As TGI's router sends it: `inputs` has the chunks once more, with the picture in base64."""
    inputs = "".join(part if isinstance(part, str) else "![](data:image/png;base64,AAAA)" for part in parts)
    chunks = pb.Input(chunks=[chunk(part) for part in parts])
    return pb.Request(id=number, inputs=inputs, input_chunks=chunks, stopping_parameters=STOPPING, **more)


def talk(
    loaded: LoadedModel, folder: Path, conversation: Callable[[rpc.TextGenerationServiceStub], Awaitable[Any]]
) -> Any:
    async def run() -> Any:
        async with serving(loaded, folder / "shard-0") as shard:
            await shard.Warmup(warmup(max_total_tokens=256, max_batch_total_tokens=1024))
            return await conversation(shard)

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["qwen2-vl", "llava-next", "idefics3"])
def test_a_batch_with_pictures_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    seeing = make(name, tmp_path)
    loaded = load(ModelFiles.open(seeing.folder), replace(OPTIONS, dtype="float32"))  # by default packed on a CPU
    marker, tokenizer = seeing.rules.marker, loaded.files.tokenizer()
    asked = [["see ", WIDE, "what?"], [TALL, "and", WIDE], ["no picture"]]

    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        requests = [request(number, *parts, truncate=250, chunk_len=40) for number, parts in enumerate(asked)]
        await finish(shard, log, log.add(await shard.Prefill(prefill(1, *requests))))
        return log

    log = talk(loaded, tmp_path, conversation)
    for number, parts in enumerate(asked):
        text = "".join(part if isinstance(part, str) else marker for part in parts)
        images = iter(part for part in parts if isinstance(part, bytes))
        ids = [next(images) if token == seeing.rules.token_id else token for token in tokenizer.encode(text).ids]
        expected, _ = seeing.expected(seeing.request(number, *ids))
        assert log.tokens[number] == expected[:NUM_TOKENS]


REFUSALS = {
    "cut off": (request(7, "a", WIDE[:200]), "image 0 of `input_chunks` is damaged or truncated"),
    "no picture": (request(7, WIDE, b"GIF"), "image 1 of `input_chunks` is not a PNG, JPEG, GIF, WebP or TIFF file"),
    "too thin": (request(7, tiny.picture(500, 2)), "image 0 of `input_chunks` is not supported: the aspect ratio"),
    "too long": (request(7, "a", WIDE, truncate=10), "`truncate` cannot cut 18 tokens to 10"),
    "mark as text": (request(7, "<|image_pad|>", WIDE), "1 images and 2 image tokens"),
    "mark and no picture": (request(7, "<|image_pad|>"), "0 images and 1 image tokens"),
    "ids without a place": (request(7, WIDE, input_ids=[70, 71]), "1 images and 0 image tokens"),
}


def test_an_image_that_cannot_be_read_is_refused_by_its_number(tmp_path: Path) -> None:
    loaded = load_model(make("qwen2-vl", tmp_path).folder)

    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        running = (await shard.Prefill(prefill(1, request(1, "see", WIDE)))).batch
        for bad, words in REFUSALS.values():
            code, said = await refusal(shard.Prefill(prefill(2, request(2, TALL), bad, join=running)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "request 7: " in said and words in said
        log = Log()
        await finish(shard, log, running)
        assert len(log.tokens[1]) == NUM_TOKENS - 1

    talk(loaded, tmp_path, conversation)


def test_a_model_without_vision_refuses_an_image(tmp_path: Path) -> None:
    loaded = load_model(tiny_llama(tmp_path))
    code, said = talk(loaded, tmp_path, lambda shard: refusal(shard.Prefill(prefill(1, request(3, "a", WIDE)))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said == "request 3: this model takes text only, and `input_chunks` has an image"
