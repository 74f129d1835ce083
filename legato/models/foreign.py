"""Which models are left to transformers, found out without importing it: that takes seconds, and who misspelt a name
should not wait for them."""

from __future__ import annotations

from collections.abc import Container
from importlib.util import find_spec
from pathlib import Path

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.files import ModelFiles
from legato.models.catalogue import CATALOGUE

STATEFUL = "it keeps a state, which the KV cache has no place for"
ENCODER_DECODER = "it is an encoder-decoder model"
# Those of which the former is known. Others are found out when they are built.
STATEFUL_TYPES = {
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2",
}  # fmt: skip


class Mentioned:
    """The types that stand in quotes where transformers lists those it knows. All of them, and perhaps a few more."""

    def __init__(self) -> None:
        spec = find_spec("transformers")
        folder = Path(spec.origin if spec is not None and spec.origin else "").parent / "models" / "auto"
        self._lists = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]

    def __contains__(self, model_type: object) -> bool:
        return not self._lists or any(f'"{model_type}"' in each for each in self._lists)


def check(files: ModelFiles, trust_remote_code: bool, known: Container[str]) -> None:
    """Raises unless transformers can build the model, as far as the name of its type says."""
    config = files.config()
    kind = str(config.get("model_type"))
    if kind == "ssm" or (kind == "None" and "ssm_cfg" in config):
        raise UnsupportedModel(
            "config.json is that of Mamba's first format, which comes without a tokenizer; serve the model in"
            " transformers' format, such as state-spaces/mamba-130m-hf"
        )
    if not {"model_type", "auto_map"} & set(config):
        raise ModelFileError(f"{files.path / 'config.json'} has no 'model_type'")
    if files.weight_format != "safetensors":
        raise UnsupportedModel(f"model_type '{kind}' runs through transformers, which needs safetensors")
    if kind in STATEFUL_TYPES and not trust_remote_code:
        raise unsupported(kind, f"transformers has it, but {STATEFUL}")
    if config.get("is_encoder_decoder") is True:
        raise unsupported(kind, ENCODER_DECODER)
    if kind in known or trust_remote_code:
        return
    if "auto_map" in config:
        raise UnsupportedModel(
            f"model_type '{kind}' is not supported without the Python code that comes with the model; "
            "--trust-remote-code runs it"
        )
    raise unsupported(kind, "transformers does not support it either")


def unsupported(model_type: str, reason: str) -> UnsupportedModel:
    known = ", ".join(sorted(CATALOGUE))
    return UnsupportedModel(f"model_type '{model_type}' is not supported: {reason}. Supported: {known}")
