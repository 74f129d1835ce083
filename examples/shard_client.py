"""Calls a shard directly, like a client of TGI's: unary calls on its unix socket, without a router.

python examples/shard_client.py --warmup --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import asyncio

import grpc

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc

MAX_INPUT_TOKENS = MAX_NEW_TOKENS = 1024
# Deadline of every call; a warm-up on a CPU may take a minute.
DEADLINE = ("grpc.service_config", '{"methodConfig": [{"name": [{}], "timeout": "300s"}]}')
# In proto3 a missing field is zero, so parameters whose neutral value is one must be set.
GREEDY = pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)


def batch_of_one(prompt: str, max_new_tokens: int) -> pb.Batch:
    request = pb.Request(
        inputs=prompt,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=prompt)]),
        truncate=MAX_INPUT_TOKENS,
        add_special_tokens=True,
        parameters=GREEDY,
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens),
    )
    return pb.Batch(id=1, requests=[request], size=1, max_tokens=MAX_INPUT_TOKENS + max_new_tokens)


async def generate(shard: rpc.TextGenerationServiceStub, batch: pb.Batch) -> pb.GeneratedText:
    """Prefill returns the first token, every Decode one more; the last one also returns the whole text."""
    answer: pb.PrefillResponse | pb.DecodeResponse = await shard.Prefill(pb.PrefillRequest(batch=batch))
    while True:
        for generation in answer.generations:
            print("".join(generation.tokens.texts), end="", flush=True)
            if generation.HasField("generated_text"):
                return generation.generated_text
        answer = await shard.Decode(pb.DecodeRequest(batches=[answer.batch]))


async def converse(socket: str, prompt: str, max_new_tokens: int, warmup: bool) -> None:
    batch = batch_of_one(prompt, max_new_tokens)
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[DEADLINE]) as channel:
        shard = rpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        info = await shard.Info(pb.InfoRequest())
        await shard.Health(pb.HealthRequest())
        print(f"a healthy shard: {info.dtype} on {info.device_type}")
        if warmup:
            await shard.Warmup(pb.WarmupRequest(batch=batch, max_prefill_tokens=MAX_INPUT_TOKENS))
        try:
            text = await generate(shard, batch)
        finally:  # also after an interrupt; without an id, because a finished batch is unknown
            await shard.ClearCache(pb.ClearCacheRequest())
        print(f"\n{text.generated_tokens} tokens, {pb.FinishReason.Name(text.finish_reason)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate from a shard without a router.")
    parser.add_argument("--socket", default="/tmp/text-generation-server-0", help="the shard's unix socket")
    parser.add_argument("--prompt", default="Once upon a time", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=20, help="stop here at the latest")
    parser.add_argument("--warmup", action="store_true", help="needed once per shard: allocates its KV cache")
    options = parser.parse_args()
    if not 1 <= options.max_new_tokens <= MAX_NEW_TOKENS:
        parser.error(f"--max-new-tokens must lie between 1 and {MAX_NEW_TOKENS}")
    try:
        asyncio.run(converse(**vars(options)))
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"--socket {options.socket}: {error.code().name}, {error.details()}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
