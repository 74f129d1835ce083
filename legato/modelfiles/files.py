"""The files of a model, independent of their format.

    ModelFiles.open(path)
    ├── a folder with config.json, tokenizer.json and *.safetensors  (Hugging Face's layout)
    ├── a .gguf file, or a folder with exactly one
    └── a folder with adapter_config.json: a LoRA adapter, to be merged into its base model

All have the same interface, in terms of Hugging Face's files. Opening looks at names only; `check_weights` reads the
headers of the weight files, so that a truncated download is reported before anything is loaded.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from legato.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from legato.modelfiles.gguf import config as gguf_config
from legato.modelfiles.gguf.file import GgufFile
from legato.modelfiles.gguf.tokenizer import tokenizer_from_gguf
from legato.modelfiles.tokenizers import load_tokenizer, set_special_tokens, token_number
from legato.modelfiles.vocabularies import remote
from legato.modelfiles.vocabularies.find import tokenizer_from_files
from legato.modelfiles.vocabularies.special import TokenizerSettings

WeightFormat = Literal["safetensors", "gguf"]

INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# PyTorch's own files, in the order in which they are looked for. `legato.server.convert` makes safetensors of them.
PICKLE_SUFFIXES = (".bin", ".pt")
# The limit of the safetensors library.
MAX_SAFETENSORS_HEADER = 100_000_000


class ModelFiles(ABC):
    weight_format: WeightFormat

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open(path: Path, cache: Path | None = None) -> ModelFiles:
        """`cache` is where the base model of an adapter may be, if not in the Hub's own cache folder."""
        if path.suffix == ".gguf" and path.is_file():
            return GgufModel(path)
        if not path.is_dir():
            raise ModelNotFound(f"{path}: no such folder or .gguf file")
        ggufs = sorted(path.glob("*.gguf"))
        # Repositories of GGUF files often include the config.json of the original model.
        if (path / "config.json").exists() and (not ggufs or any(path.glob("*.safetensors"))):
            return ModelFolder(path)
        if len(ggufs) == 1:
            return GgufModel(ggufs[0])
        if (path / "adapter_config.json").is_file():
            from legato.modelfiles.merged import MergedModel  # a model that needs others to be found

            return MergedModel(path, cache)
        if ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise ModelNotFound(f"{path} contains several models; choose one of {names}")
        raise ModelFileError(f"{path / 'config.json'} is missing: {path} is not a model folder")

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json: architecture and dimensions."""

    def quantization(self) -> tuple[str, dict[str, Any]] | None:
        """How the weights are quantized, and where that is said; None: they are not, or in GGUF's own types."""
        return None

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json: generation defaults."""

    @abstractmethod
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json: special tokens as strings, chat_template, add_bos_token, model_max_length."""

    @abstractmethod
    def chat_template(self) -> tuple[str, Any] | None:
        """File name and content of the chat template: a string, or a list of objects with a name and a template."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def weight_files(self) -> list[Path]: ...

    @abstractmethod
    def check_weights(self) -> None:
        """Raises `ModelFileError` for a truncated or malformed weight file. Reads headers only."""

    def end_of_tokenizer(self) -> int | None:
        """The token that the tokenizer names as the end of a text."""
        return None

    def eos_token_ids(self) -> list[int]:
        """The tokens that end a generation: those of generation_config.json, or else of config.json, and the
        tokenizer's, which is often the only one that a fine-tuned model changes."""
        config = self.config()
        language = config.get("text_config")
        parts = [config, language] if isinstance(language, dict) else [config]
        found: list[int] = []
        for each in (self.generation_config(), *parts):
            ids = each.get("eos_token_id")
            if ids is not None:
                found = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(token_id, int) and 0 <= token_id < 1 << 32 for token_id in found):
                    raise ModelFileError(f"{self.path}: eos_token_id must be token ids, not {found}")
                break
        end = self.end_of_tokenizer()
        sizes = [size for each in parts if isinstance(size := each.get("vocab_size"), int)]
        if end is None or end in found or end >= max(sizes, default=end + 1):
            return found
        return [*found, end]


class GgufModel(ModelFiles):
    weight_format = "gguf"

    @cached_property
    def gguf(self) -> GgufFile:
        gguf = GgufFile.open(self.path)
        if (count := gguf.metadata.get("split.count", 1)) != 1:
            raise UnsupportedModel(f"{self.path} is one of {count} parts; merge them with llama-gguf-split --merge")
        return gguf

    def config(self) -> dict[str, Any]:
        return gguf_config.config_of(self.gguf)

    def generation_config(self) -> dict[str, Any]:
        return gguf_config.generation_config_of(self.gguf)

    def tokenizer_config(self) -> dict[str, Any]:
        return gguf_config.tokenizer_config_of(self.gguf)

    def chat_template(self) -> tuple[str, Any] | None:
        template = self.tokenizer_config().get("chat_template")
        return None if template is None else (self.path.name, template)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self.gguf)

    def weight_files(self) -> list[Path]:
        return [self.path]

    def check_weights(self) -> None:
        if not self.gguf.tensors:
            raise ModelFileError(f"{self.path} has a vocabulary but no weights; use a complete model file")


class ModelFolder(ModelFiles):
    weight_format = "safetensors"

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def quantization(self) -> tuple[str, dict[str, Any]] | None:
        config = self.config()
        text_config = config.get("text_config")
        for where, keys in (("config.json", config), ("config.json, text_config", text_config)):
            for name in ("quantization_config", "compression_config"):
                if isinstance(keys, dict) and isinstance(found := keys.get(name), dict) and found:
                    return f"{where}, {name}", found
        # Files of older versions: AutoGPTQ, AutoAWQ, ModelOpt.
        if old := read_json(self.path / "quantize_config.json", optional=True):
            return "quantize_config.json", {"quant_method": "gptq", **old}
        if old := read_json(self.path / "quant_config.json", optional=True):
            return "quant_config.json", {"quant_method": "awq", **old}
        if old := read_json(self.path / "hf_quant_config.json", optional=True):
            return "hf_quant_config.json", {"quant_method": "modelopt", **old}
        return None

    def generation_config(self) -> dict[str, Any]:
        return read_json(self.path / "generation_config.json", optional=True)

    def tokenizer_config(self) -> dict[str, Any]:
        config = read_json(self.path / "tokenizer_config.json", optional=True)
        if "added_tokens_decoder" not in config:
            # Older checkpoints have their special tokens in a separate file.
            config |= read_json(self.path / "special_tokens_map.json", optional=True)
        found = self.chat_template()
        return with_plain_tokens(config) | ({} if found is None else {"chat_template": found[1]})

    def chat_template(self) -> tuple[str, Any] | None:
        """A separate file takes precedence over an entry in another file."""
        if (templates := self._template_files()) is not None:
            return "chat_template.jinja", templates
        for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
            template = read_json(self.path / name, optional=True).get("chat_template")
            if template is not None:
                return name, template
        return None

    def _template_files(self) -> str | list[dict[str, str]] | None:
        """In the form of tokenizer_config.json: one template, or several with names."""
        file = self.path / "chat_template.jinja"
        default = _read_text(file) if file.exists() else None
        more = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        if not more:
            return default
        named = ({} if default is None else {"default": default}) | {file.stem: _read_text(file) for file in more}
        return [{"name": name, "template": template} for name, template in named.items()]

    def tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer.json"
        if not file.exists() and remote.has_own_code(self.path, read_json(self.path / TOKENIZER_CONFIG, optional=True)):
            return self._remote_tokenizer()
        if not file.exists():
            return tokenizer_from_files(self.path, self.config(), self._tokenizer_settings())
        tokenizer = load_tokenizer(file)
        config = self.tokenizer_config()
        if config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast"):
            # In these classes tokenizer_config.json overrides the post-processor of tokenizer.json.
            add_bos, add_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
            set_special_tokens(
                tokenizer, config.get("bos_token") if add_bos else None, config.get("eos_token") if add_eos else None
            )
        return tokenizer

    def end_of_tokenizer(self) -> int | None:
        config = self.tokenizer_config()
        text = config.get("eos_token")
        return token_number(self.path, config, text) if isinstance(text, str) else None

    def _remote_tokenizer(self) -> Tokenizer:
        made = remote.converted(self.path)
        if not made.exists():
            raise UnsupportedModel(
                f"{self.path}: the tokenizer is Python code that comes with the model; --trust-remote-code runs it"
            )
        return load_tokenizer(made)

    def _tokenizer_settings(self) -> TokenizerSettings:
        names = (TOKENIZER_CONFIG, "added_tokens.json", "special_tokens_map.json")
        return TokenizerSettings.of(self.path, *(read_json(self.path / name, optional=True) for name in names))

    def weight_files(self) -> list[Path]:
        """The files in the index, or model.safetensors, or else all .safetensors files."""
        if (self.path / INDEX).exists():
            return self._indexed_files()
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            pickled = sorted(file.name for suffix in PICKLE_SUFFIXES for file in self.path.glob(f"*{suffix}"))
            remedy = "convert it with `text-generation-server download-weights`"
            reason = f"; {pickled[0]} is a pickle, which Legato does not load: {remedy}" if pickled else ""
            raise ModelFileError(f"{self.path} has no weights (*.safetensors){reason}")
        return files

    def _indexed_files(self) -> list[Path]:
        index = self.path / INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index} has no weight_map; download it again")
        files = [self.path / str(name) for name in sorted(set(map(str, weight_map.values())))]
        for file in files:
            if file.parent != self.path or file.name in ("", ".", ".."):
                raise ModelFileError(f"{index} refers to {file}, which is outside the folder")
            if not file.exists():
                raise ModelFileError(f"{file} is missing, but {INDEX} refers to it; download the model again")
        return files

    def check_weights(self) -> None:
        for file in self.weight_files():
            _check_safetensors(file)


def has_pickles(folder: Path) -> bool:
    return any(file for suffix in PICKLE_SUFFIXES for file in folder.glob(f"*{suffix}"))


def needs_conversion(folder: Path) -> bool:
    """Whether a model's weights are pickles and nothing else."""
    return (folder / "config.json").exists() and not any(folder.glob("*.safetensors")) and has_pickles(folder)


def with_plain_tokens(config: dict[str, Any], suffix: str = "_token") -> dict[str, Any]:
    """Replaces special tokens that are objects by their text."""
    return {
        name: value.get("content") if name.endswith(suffix) and isinstance(value, dict) else value
        for name, value in config.items()
    }


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from None


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelFileError(f"{file} is missing; download the model again") from None
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{file} must be a JSON object")
    return value


def _check_safetensors(file: Path) -> None:
    """Eight bytes of header length, a JSON header, then exactly the data that it describes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_len = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and header_len > MAX_SAFETENSORS_HEADER:
                raise ModelFileError(f"{file} is not a safetensors file: its header length is {header_len} bytes")
            header = stream.read(header_len) if len(prefix) == 8 else b""
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}; download it again") from None
    if len(prefix) < 8 or len(header) < header_len:
        raise ModelFileError(f"{file} is truncated: it ends after {size} bytes, within its header; download it again")
    try:
        end = max(_data_ends(json.loads(header)), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelFileError(f"{file}: the safetensors header is malformed; download it again") from None
    expected = 8 + header_len + end
    if size < expected:
        raise ModelFileError(f"{file} is truncated: it has {size} of {expected} bytes; download it again")
    if size > expected:
        raise ModelFileError(f"{file} has {size - expected} bytes that belong to no tensor; download it again")


def _data_ends(header: dict[str, Any]) -> Iterable[int]:
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
                raise ValueError(name)
            yield end
