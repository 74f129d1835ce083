"""The wire contract cannot move by accident: stubs are fresh, numbers are TGI's, additions keep out of their way.

Clients that were built for TGI's shards hold these numbers in their binaries. A renumbered field does not fail there,
it is read as another one; so the table below is typed by hand and compared, never generated.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from grpc_tools import protoc

from legato.pb import generate_pb2, generate_v1_pb2, generate_v2_pb2

ROOT = Path(__file__).parents[1]
FIRST_OWN_NUMBER = 100  # Legato's additions to TGI's messages start here


class Stubs(NamedTuple):
    proto: str
    folder: str
    package: str  # "" where the generated modules import each other as neighbours


STUBS = [
    Stubs("proto/generate.proto", "legato/pb", "legato.pb"),
    Stubs("proto/generate_v1.proto", "legato/pb", "legato.pb"),
    Stubs("proto/generate_v2.proto", "legato/pb", "legato.pb"),
    Stubs("examples/route_guide/route_guide.proto", "examples/route_guide", ""),
]

# TGI's generate.v3: each message with its fields in the order of their numbers, which run from 1 without a gap.
TGI_MESSAGES = {
    "HealthRequest": [],
    "HealthResponse": [],
    "InfoRequest": [],
    "InfoResponse": [
        "bool requires_padding",
        "string dtype",
        "string device_type",
        "optional uint32 window_size",
        "uint32 speculate",
        "bool support_chunking",
        "bool use_prefix_caching",
        "string attention_impl",
        "uint32 block_size",
    ],
    "ServiceDiscoveryRequest": [],
    "ServiceDiscoveryResponse": ["repeated string urls"],
    "ClearCacheRequest": ["optional uint64 id"],
    "ClearCacheResponse": [],
    "Image": ["bytes data", "string mimetype"],
    "InputChunk": ["oneof string text", "oneof Image image"],
    "Input": ["repeated InputChunk chunks"],
    "NextTokenChooserParameters": [
        "float temperature",
        "uint32 top_k",
        "float top_p",
        "float typical_p",
        "bool do_sample",
        "uint64 seed",
        "float repetition_penalty",
        "bool watermark",
        "float frequency_penalty",
        "string grammar",
        "GrammarType grammar_type",
        "repeated LogitBiasEntry logit_bias",
    ],
    "NextTokenChooserParameters.LogitBiasEntry": ["string key", "int32 value"],
    "StoppingCriteriaParameters": [
        "uint32 max_new_tokens",
        "repeated string stop_sequences",
        "bool ignore_eos_token",
    ],
    "Request": [
        "uint64 id",
        "string inputs",
        "uint32 truncate",
        "NextTokenChooserParameters parameters",
        "StoppingCriteriaParameters stopping_parameters",
        "bool prefill_logprobs",
        "uint32 top_n_tokens",
        "Input input_chunks",
        "repeated uint32 blocks",
        "repeated uint32 slots",
        "optional string adapter_id",
        "uint32 cache_len",
        "bool add_special_tokens",
        "optional uint32 chunk_len",
    ],
    "Batch": ["uint64 id", "repeated Request requests", "uint32 size", "uint32 max_tokens", "uint32 max_blocks"],
    "CachedBatch": [
        "uint64 id",
        "repeated uint64 request_ids",
        "uint32 size",
        "uint32 max_tokens",
        "uint32 current_tokens",
    ],
    "GeneratedText": [
        "string text",
        "uint32 generated_tokens",
        "FinishReason finish_reason",
        "optional uint64 seed",
    ],
    "Tokens": [
        "repeated uint32 ids",
        "repeated float logprobs",
        "repeated string texts",
        "repeated bool is_special",
    ],
    "Generation": [
        "uint64 request_id",
        "Tokens prefill_tokens",
        "Tokens tokens",
        "optional GeneratedText generated_text",
        "repeated Tokens top_tokens",
    ],
    "FilterBatchRequest": ["uint64 batch_id", "repeated uint64 request_ids"],
    "FilterBatchResponse": ["CachedBatch batch"],
    "PrefillRequest": ["Batch batch", "CachedBatch cached_batch"],
    "PrefillResponse": [
        "repeated Generation generations",
        "optional CachedBatch batch",
        "uint64 forward_ns",
        "uint64 decode_ns",
        "uint64 total_ns",
        "optional uint64 concat_ns",
    ],
    "DecodeRequest": ["repeated CachedBatch batches"],
    "DecodeResponse": [
        "repeated Generation generations",
        "optional CachedBatch batch",
        "uint64 forward_ns",
        "uint64 decode_ns",
        "uint64 total_ns",
        "optional uint64 concat_ns",
    ],
    "WarmupRequest": [
        "Batch batch",
        "optional uint32 max_input_tokens",
        "uint32 max_prefill_tokens",
        "optional uint32 max_total_tokens",
    ],
    "WarmupResponse": [
        "optional uint32 max_supported_total_tokens",
        "uint32 max_input_tokens",
        "uint32 max_total_tokens",
    ],
}

# What TGI's generate.v2 has otherwise than v3: fewer fields, from 1 without a gap as well.
V2_FIELDS = {
    "InfoResponse": 5,
    "NextTokenChooserParameters": 11,
    "Request": 7,
    "Batch": 4,
    "CachedBatch": 4,
    "PrefillRequest": 1,
    "PrefillResponse": 5,
    "WarmupResponse": 1,
}
V2_MESSAGES = {name: fields[: V2_FIELDS.get(name)] for name, fields in TGI_MESSAGES.items()} | {
    "WarmupRequest": [
        "Batch batch",
        "uint32 max_input_length",
        "uint32 max_prefill_tokens",
        "uint32 max_total_tokens",
    ],
}
for absent in ("Image", "InputChunk", "Input", "NextTokenChooserParameters.LogitBiasEntry"):
    del V2_MESSAGES[absent]

# What generate.v1 has otherwise than v2; numbers where they have a gap.
V1_FIELDS = {
    "InfoResponse": 4,
    "NextTokenChooserParameters": 8,
    "PrefillResponse": 2,
    "DecodeResponse": 2,
    "WarmupRequest": 1,
}
V1_MESSAGES = {name: fields[: V1_FIELDS.get(name)] for name, fields in V2_MESSAGES.items() if name != "Tokens"} | {
    "TokensRequest": ["string text"],
    "TokensResponse": ["int32 ntokens"],
    "GeneratedText": [*TGI_MESSAGES["GeneratedText"], "uint32 prompt_tokens"],
    "PrefillTokens": ["repeated uint32 ids", "repeated float logprobs", "repeated string texts"],
    "TopTokens": {1: "repeated uint32 ids", 2: "repeated float logprobs", 3: "repeated string texts",
                  6: "repeated bool is_special"},
    "Generation": [
        "uint64 request_id",
        "PrefillTokens prefill_tokens",
        "uint32 token_id",
        "float token_logprob",
        "string token_text",
        "bool token_is_special",
        "optional GeneratedText generated_text",
        "TopTokens top_tokens",
    ],
}  # fmt: skip

# Values in the order of their numbers, which run from 0.
TGI_ENUMS = {
    "GrammarType": ["GRAMMAR_TYPE_NONE", "GRAMMAR_TYPE_JSON", "GRAMMAR_TYPE_REGEX"],
    "FinishReason": ["FINISH_REASON_LENGTH", "FINISH_REASON_EOS_TOKEN", "FINISH_REASON_STOP_SEQUENCE"],
}

METHODS = [
    "Info(InfoRequest) -> InfoResponse",
    "ServiceDiscovery(ServiceDiscoveryRequest) -> ServiceDiscoveryResponse",
    "ClearCache(ClearCacheRequest) -> ClearCacheResponse",
    "FilterBatch(FilterBatchRequest) -> FilterBatchResponse",
    "Warmup(WarmupRequest) -> WarmupResponse",
    "Prefill(PrefillRequest) -> PrefillResponse",
    "Decode(DecodeRequest) -> DecodeResponse",
    "Health(HealthRequest) -> HealthResponse",
    "PrepareGrammar(PrepareGrammarRequest) -> PrepareGrammarResponse",
    "LoadAdapter(LoadAdapterRequest) -> LoadAdapterResponse",
    "UnloadAdapter(UnloadAdapterRequest) -> UnloadAdapterResponse",
    "Tokens(stream StepRequest) -> stream StepResponse",
]


def generate(stubs: Stubs, folder: Path) -> None:
    """What `make proto` does, into another folder."""
    source = ROOT / stubs.proto
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{source.parent}", *outputs, str(source)]) == 0
    if stubs.package:
        for path in folder.glob("*_pb2_grpc.py"):
            absolute = rf"from {stubs.package} import \1_pb2 as"
            path.write_text(re.sub(r"^import (\w+)_pb2 as", absolute, path.read_text(), flags=re.MULTILINE))


def contract() -> FileDescriptorProto:
    file = FileDescriptorProto()
    generate_pb2.DESCRIPTOR.CopyToProto(file)
    return file


def local(type_name: str) -> str:
    return type_name.rpartition(".")[2]


def declaration(field: FieldDescriptorProto) -> str:
    """The field as the proto file writes it, without its number."""
    kind = local(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind} {field.name}"
    if field.proto3_optional:
        return f"optional {kind} {field.name}"
    return f"oneof {kind} {field.name}" if field.HasField("oneof_index") else f"{kind} {field.name}"


def messages() -> dict[str, DescriptorProto]:
    """Every message of the contract; one inside another goes by both names."""
    found = {message.name: message for message in contract().message_type}
    inner = {f"{name}.{inside.name}": inside for name, message in found.items() for inside in message.nested_type}
    return found | inner


@pytest.mark.parametrize("stubs", STUBS, ids=lambda stubs: stubs.proto)
def test_generated_stubs_are_fresh(stubs: Stubs, tmp_path: Path) -> None:
    generate(stubs, tmp_path)
    stale = [
        f"{stubs.folder}/{fresh.name}"
        for fresh in sorted(tmp_path.iterdir())
        if fresh.read_text() != (ROOT / stubs.folder / fresh.name).read_text()
    ]
    assert not stale, f"differ from what {stubs.proto} generates: run `make proto` and commit the result"


@pytest.mark.parametrize("name", TGI_MESSAGES)
def test_a_message_of_tgi_keeps_its_fields_and_numbers(name: str) -> None:
    taken = {f.number: declaration(f) for f in messages()[name].field if f.number < FIRST_OWN_NUMBER}
    assert taken == dict(enumerate(TGI_MESSAGES[name], start=1))


@pytest.mark.parametrize("name", TGI_ENUMS)
def test_an_enum_of_tgi_keeps_its_values_and_numbers(name: str) -> None:
    (enum,) = [enum for enum in contract().enum_type if enum.name == name]
    taken = {value.number: value.name for value in enum.value if value.number < FIRST_OWN_NUMBER}
    assert taken == dict(enumerate(TGI_ENUMS[name]))


def test_the_service_has_the_methods_of_tgi_and_those_of_our_router() -> None:
    (service,) = contract().service
    signatures = [
        f"{method.name}({'stream ' * method.client_streaming}{local(method.input_type)})"
        f" -> {'stream ' * method.server_streaming}{local(method.output_type)}"
        for method in service.method
    ]
    assert signatures == METHODS


def test_clients_of_tgi_find_the_service_under_its_name() -> None:
    """The name is part of every call's path: /generate.v3.TextGenerationService/Prefill."""
    (service,) = contract().service
    assert (contract().package, service.name) == ("generate.v3", "TextGenerationService")


@pytest.mark.parametrize(
    ("module", "package", "expected", "has_grammars"),
    [(generate_v2_pb2, "generate.v2", V2_MESSAGES, True), (generate_v1_pb2, "generate.v1", V1_MESSAGES, False)],
)
def test_an_older_contract_of_tgi_is_what_it_was(
    module: Any, package: str, expected: dict[str, Any], has_grammars: bool
) -> None:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    found = {message.name: {f.number: declaration(f) for f in message.field} for message in file.message_type}
    numbered = {
        name: fields if isinstance(fields, dict) else dict(enumerate(fields, start=1))
        for name, fields in expected.items()
    }
    assert found == numbered
    enums = {enum.name: [value.name for value in enum.value] for enum in file.enum_type}
    assert enums == {name: values for name, values in TGI_ENUMS.items() if has_grammars or name != "GrammarType"}
    (service,) = file.service
    methods = [f"{method.name}({local(method.input_type)}) -> {local(method.output_type)}" for method in service.method]
    added = [] if has_grammars else ["Tokens(TokensRequest) -> TokensResponse"]
    assert (file.package, service.name, methods) == (package, "TextGenerationService", METHODS[:8] + added)
