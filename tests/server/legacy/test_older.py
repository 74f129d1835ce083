"""Clients of TGI's older contracts, generated from each proto file, against a shard of today.

A client is a process of its own that has nothing of Legato, only what protoc makes of the proto file.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_tools import protoc

from legato.server.loading import LoadedModel
from tests.server.shard import load_model, serving
from tests.tiny_models import greedy_oracle, tiny_llama

PROTO = Path(__file__).parents[3] / "proto"
PROMPT, NUM_TOKENS = "hello", 6
# What both clients do. `Warmup` is for those who call it.
CLIENT = """
import json, sys
import grpc
import {module}_pb2 as pb, {module}_pb2_grpc as rpc

shard = rpc.TextGenerationServiceStub(grpc.insecure_channel("unix://" + sys.argv[1]))
parameters = pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
def request(number, **more):
    stopping = pb.StoppingCriteriaParameters(max_new_tokens={num_tokens}, ignore_eos_token=True)
    return pb.Request(id=number, inputs={prompt!r}, truncate=64, parameters=parameters, stopping_parameters=stopping,
                      **more)
info = shard.Info(pb.InfoRequest())
shard.Health(pb.HealthRequest())
said = {{"dtype": info.dtype, "urls": list(shard.ServiceDiscovery(pb.ServiceDiscoveryRequest()).urls)}}
{warmup}
first = shard.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1, requests=[
    request(7, prefill_logprobs=True, top_n_tokens=2), request(8)], size=2)))
batch = shard.FilterBatch(pb.FilterBatchRequest(batch_id=1, request_ids=[7])).batch
assert (batch.id, list(batch.request_ids), batch.size) == (1, [7], 1)
generations = [next(g for g in first.generations if g.request_id == 7)]
while not generations[-1].HasField("generated_text"):
    answer = shard.Decode(pb.DecodeRequest(batches=[batch]))
    generations += answer.generations
shard.ClearCache(pb.ClearCacheRequest(id=1))
last = generations[-1].generated_text
said |= {{"text": last.text, "generated_tokens": last.generated_tokens, "reason": last.finish_reason}}
{rest}
print(json.dumps(said))
"""
V2_WARMUP = """
warm = shard.Warmup(pb.WarmupRequest(batch=pb.Batch(requests=[request(0)]), max_input_length=64, max_prefill_tokens=64,
                                     max_total_tokens=128))
assert warm.max_supported_total_tokens >= 128
"""
V2_REST = """
said["ids"] = [i for g in generations for i in g.tokens.ids]
said["texts"] = [t for g in generations for t in g.tokens.texts]
said["special"] = [s for g in generations for s in g.tokens.is_special]
said["prefill"] = list(generations[0].prefill_tokens.ids)
said["top"] = [list(t.ids) for t in generations[0].top_tokens]
assert answer.total_ns > answer.forward_ns > 0
"""
V1_REST = """
said["ids"] = [g.token_id for g in generations]
said["texts"] = [g.token_text for g in generations]
said["special"] = [g.token_is_special for g in generations]
said["prefill"] = list(generations[0].prefill_tokens.ids)
said["top"] = [list(generations[0].top_tokens.ids)]
assert len(generations[0].prefill_tokens.logprobs) == len(said["prefill"])
assert list(generations[0].top_tokens.is_special) == [False] * 2
said["prompt_tokens"] = last.prompt_tokens
said["ntokens"] = shard.Tokens(pb.TokensRequest(text={prompt!r})).ntokens
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture
def ask(loaded: LoadedModel, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def talk(module: str, warmup: str, rest: str) -> dict[str, Any]:
        outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python")]
        assert protoc.main(["protoc", f"-I{PROTO}", *outputs, str(PROTO / f"{module}.proto")]) == 0
        words = {"module": module, "num_tokens": NUM_TOKENS, "prompt": PROMPT}
        client = tmp_path / "client.py"
        client.write_text(CLIENT.format(**words, warmup=warmup, rest=rest.format(**words)))
        return asyncio.run(converse(loaded, tmp_path / "shard-0", client))

    return talk


async def converse(loaded: LoadedModel, socket: Path, client: Path) -> dict[str, Any]:
    async with serving(loaded, socket):
        words = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(client.parent)!r}); import client"]
        process = await asyncio.create_subprocess_exec(
            *words, str(socket), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        said: dict[str, Any] = json.loads(out)
        return said


@pytest.mark.parametrize(
    ("module", "warmup", "rest"),
    [("generate_v2", V2_WARMUP, V2_REST), ("generate_v1", "", V1_REST)],
    ids=["v2", "v1, which has clients that never call Warmup"],
)
def test_a_client_of_an_older_contract_gets_the_tokens_of_the_model(
    ask: Callable[..., dict[str, Any]], folder: Path, module: str, warmup: str, rest: str
) -> None:
    said = ask(module, warmup, rest)
    prompt = said["prefill"]
    (expected,) = greedy_oracle(folder, [prompt], NUM_TOKENS)
    assert said["ids"] == expected
    assert said["generated_tokens"] == NUM_TOKENS and said["reason"] == 0
    plain = [text for text, special in zip(said["texts"], said["special"], strict=True) if not special]
    assert said["text"] == "".join(plain)
    assert said["top"][0][0] == expected[0] and len(said["top"][0]) == 2
    assert said["dtype"] == "torch.float32" and said["urls"][0].endswith("shard-0")
    if module == "generate_v1":
        assert said["prompt_tokens"] == said["ntokens"] == len(prompt)
