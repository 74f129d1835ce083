"""Which models are left to transformers, asked before its models are imported: that alone takes seconds."""

from __future__ import annotations

from transformers import CONFIG_MAPPING

from legato.common.errors import UnsupportedModel
from legato.common.model_files import ModelFiles
from legato.models.registry import ARCHITECTURES


def check(files: ModelFiles, trust_remote_code: bool) -> None:
    """Raises unless transformers can build the model, as far as its name says."""
    kind = str(files.config().get("model_type"))
    if files.weight_format != "safetensors":
        raise UnsupportedModel(f"model_type '{kind}' runs through transformers, which needs safetensors")
    if kind in CONFIG_MAPPING or trust_remote_code:
        return
    if "auto_map" in files.config():
        raise UnsupportedModel(
            f"model_type '{kind}' is not supported without the Python code that comes with the model; "
            "--trust-remote-code runs it"
        )
    raise unsupported(kind, "transformers does not know it either")


def unsupported(model_type: str, reason: str) -> UnsupportedModel:
    known = ", ".join(sorted(ARCHITECTURES))
    return UnsupportedModel(f"model_type '{model_type}' is not supported: {reason}. Supported: {known}")
