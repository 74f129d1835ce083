"""The model in the formats that the engines read: the original file, or a folder with float32 weights."""

from __future__ import annotations

import json
from pathlib import Path

from legato.benchmark.cpu.dummy_gguf import write_dummy_gguf
from legato.common.options import ModelOptions
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.locate import locate
from legato.modelfiles.shapes import SHAPES


class CpuModel:
    """`scratch` is a folder for copies; it lives as long as the benchmark."""

    def __init__(self, model_id: str | None, scratch: Path) -> None:
        if model_id in SHAPES:
            self.path = write_dummy_gguf(model_id, scratch / model_id)
        else:
            self.path = locate(ModelOptions(model_id=model_id))
        self.files = ModelFiles.open(self.path)
        self._scratch = scratch

    @property
    def gguf(self) -> Path | None:
        """Its GGUF file, if it is one."""
        return self.files.path if self.files.weight_format == "gguf" else None

    def dense_folder(self) -> Path:
        """A folder in Hugging Face's format, for engines that read no GGUF."""
        return self.path if self.gguf is None else write_dense(self.files, self._scratch / "dense")


def write_dense(files: ModelFiles, folder: Path) -> Path:
    """A copy of a GGUF model with its weights expanded to float32, in Hugging Face's format."""
    if (folder / "config.json").exists():
        return folder
    from safetensors.torch import save_file  # brings in torch

    from legato.models.gguf_source import GgufSource

    folder.mkdir(parents=True, exist_ok=True)
    source = GgufSource(files.path)
    tensors = {name: source.read(name, ()).clone().contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(files.tokenizer_config()))
    (folder / "config.json").write_text(json.dumps(files.config() | {"torch_dtype": "float32"}))
    return folder
