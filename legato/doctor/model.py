"""Checks of a model's files: complete, readable, of a supported type, and not too large."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from legato.common.errors import LegatoError, ModelNotFound
from legato.doctor.findings import Finding, ok, problem, warning
from legato.modelfiles.files import ModelFiles
from legato.models import foreign
from legato.models.catalogue import CATALOGUE
from legato.plan.cli import PlanOptions, find

GIB = 2**30


def look_at_model(options: PlanOptions, room: int, where: str) -> Iterator[Finding]:
    """`room` is the memory of the devices together, `where` what they are called."""
    name = options.model_id or "the default model"
    try:
        path = find(options)
    except ModelNotFound as error:
        fetch = f"text-generation-server download-weights {options.model_id or ''}".rstrip()
        yield warning("model", str(error).partition(":")[0], f"it is downloaded at the first start, or by `{fetch}`")
        return
    try:
        files = ModelFiles.open(path)
        files.config()
        files.check_weights()
        size = sum(file.stat().st_size for file in files.weight_files())
        vocabulary = files.tokenizer().get_vocab_size()
    except LegatoError as error:
        yield problem("model", str(error), _way_out(path, options.model_id))
        return
    yield ok("model", f"{name} in {path}: {size / GIB:.2f} GiB of {files.weight_format}, {vocabulary} tokens")
    yield from _look_at_type(files, options.trust_remote_code)
    yield from _look_at_size(size, room, where, options.model_id)
    if files.chat_template() is None:
        yield warning("chat template", "the model has none", "use /generate and /v1/completions, or an instruct model")


def _look_at_type(files: ModelFiles, trust_remote_code: bool) -> Iterator[Finding]:
    model_type = str(files.config().get("model_type"))
    if model_type in CATALOGUE:
        yield ok("model_type", f"{model_type}: Legato's own code")
        return
    if not all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        yield problem("model_type", f"{model_type} has no code in Legato", "pip install 'legato[transformers]'")
        return
    try:
        foreign.check(files, trust_remote_code, foreign.Mentioned())
    except LegatoError as error:
        yield problem("model_type", str(error).partition(". Supported")[0], "docs/models.md lists what is served")
        return
    remedy = "nothing, if one shard is enough; docs/models.md lists what has code of its own"
    yield warning("model_type", f"{model_type} runs through transformers, in one shard", remedy)


def _look_at_size(size: int, room: int, where: str, model_id: str | None) -> Iterator[Finding]:
    """Weights in files against memory; `legato plan` knows the rest."""
    found = f"{size / GIB:.2f} GiB of weights, {room / GIB:.1f} GiB of {where}"
    plan = f"see `legato plan {model_id or ''}".rstrip() + "`"
    if size > room:
        yield problem("room", found, f"{plan}; use more or larger devices, --quantize, or a smaller model")
    elif size > 0.8 * room:
        yield warning("room", f"{found}: little is left for the KV cache", plan)
    else:
        yield ok("room", found)


def _way_out(path: Path, model_id: str | None) -> str:
    if not path.exists():
        return "give a folder or a .gguf file that exists, or the id of a Hub repository"
    if path.parent.name == "snapshots":
        return f"remove {path.parent.parent} and fetch it again: text-generation-server download-weights {model_id}"
    return "copy the file again from where the folder came from"
