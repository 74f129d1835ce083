"""Model files: folders in Hugging Face's layout and GGUF files, complete and damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from legato.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from legato.modelfiles import hub
from legato.modelfiles.files import INDEX, ModelFiles
from tests.modelfiles.gguf_files import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model in one file."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    save_file({"w": np.ones((4, 4), dtype=np.float32)}, path / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def shard(folder: Path, **files: str) -> None:
    """Turns the model into one with an index: tensor -> file."""
    (folder / "model.safetensors").unlink()
    for tensor, file in files.items():
        save_file({tensor: np.ones(3, dtype=np.float32)}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_model(path: Path, architecture: str = "llama", *, change: dict[str, Any] | None = None) -> Path:
    """A tiny GGUF model. `change` sets metadata, removes it (None), or adds tensors (arrays)."""
    entries: dict[str, Any] = {
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 32,
        f"{architecture}.feed_forward_length": 64,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 500_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "<s>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 1, 3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "token_embd.weight": np.ones((4, 32), dtype=np.float16),
        **(change or {}),
    }
    return write_gguf(path, entries, architecture)


def gguf_config(tmp_path: Path, architecture: str = "llama", **change: Any) -> dict[str, Any]:
    """`change` with __ for a dot, below the architecture's prefix."""
    renamed = {f"{architecture}.{key.replace('__', '.')}": value for key, value in change.items()}
    return ModelFiles.open(write_model(tmp_path / "m.gguf", architecture, change=renamed)).config()


class TestOpening:
    def test_a_folder_with_a_config_is_read_as_safetensors(self, folder: Path) -> None:
        files = ModelFiles.open(folder)
        assert files.weight_format == "safetensors"
        assert files.path == folder
        assert files.weight_files() == [folder / "model.safetensors"]

    def test_a_gguf_file_and_a_folder_with_just_that_file_are_the_same_model(self, tmp_path: Path) -> None:
        file = write_model(tmp_path / "m.gguf")
        for path in (file, tmp_path):
            files = ModelFiles.open(path)
            assert (files.weight_format, files.weight_files()) == ("gguf", [file])

    def test_a_config_beside_a_gguf_file_does_not_hide_it(self, folder: Path) -> None:
        write_model(folder / "m.gguf")
        assert ModelFiles.open(folder).weight_format == "safetensors"
        (folder / "model.safetensors").unlink()
        assert ModelFiles.open(folder).weight_format == "gguf"

    def test_a_folder_with_several_gguf_files_asks_for_one(self, tmp_path: Path) -> None:
        write_model(tmp_path / "q4.gguf")
        write_model(tmp_path / "q8.gguf")
        with pytest.raises(ModelNotFound, match=r"choose one of q4\.gguf, q8\.gguf"):
            ModelFiles.open(tmp_path)

    def test_a_missing_path_is_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="nowhere"):
            ModelFiles.open(tmp_path / "nowhere")

    def test_a_folder_without_a_config_is_not_a_model(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(ModelFileError, match=r"config\.json is missing"):
            ModelFiles.open(folder)


class TestConfigs:
    def test_the_generation_config_overrides_the_eos_of_the_config(self, folder: Path) -> None:
        assert ModelFiles.open(folder).eos_token_ids() == [2]
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
        assert ModelFiles.open(folder).eos_token_ids() == [2, 7]

    def test_an_invalid_eos_token_id_is_refused(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        with pytest.raises(ModelFileError, match="eos_token_id"):
            ModelFiles.open(folder).eos_token_ids()

    @pytest.mark.parametrize("content", ["{", "[1]", "\xff\xfe", "[" * 100_000])
    def test_an_invalid_config_is_reported_by_name(self, content: str, folder: Path) -> None:
        (folder / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelFileError, match=r"config\.json"):
            ModelFiles.open(folder).config()

    def test_tokens_written_as_objects_come_back_as_strings(self, folder: Path) -> None:
        config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "model_max_length": 99}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert ModelFiles.open(folder).tokenizer_config() == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": 99,
        }

    def test_a_chat_template_file_takes_precedence(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text('{"chat_template": "entry"}')
        assert ModelFiles.open(folder).tokenizer_config()["chat_template"] == "entry"
        (folder / "chat_template.json").write_text('{"chat_template": "older file"}')
        assert ModelFiles.open(folder).tokenizer_config()["chat_template"] == "older file"
        (folder / "chat_template.jinja").write_text("{{ file }}")
        assert ModelFiles.open(folder).tokenizer_config()["chat_template"] == "{{ file }}"


class TestTokenizer:
    def test_the_tokenizer_file_is_loaded(self, folder: Path) -> None:
        assert ModelFiles.open(folder).tokenizer().encode("hello").ids == [3]

    @pytest.mark.parametrize(
        ("flags", "ids"),
        [({}, [1, 3]), ({"add_bos_token": False}, [3]), ({"add_bos_token": True, "add_eos_token": True}, [1, 3, 2])],
    )
    def test_llama_tokenizers_follow_their_config(self, flags: dict[str, bool], ids: list[int], folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing("</s> $A", None, [("</s>", 2)])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert ModelFiles.open(folder).tokenizer().encode("hello").ids == ids

    def test_a_missing_tokenizer_is_reported_with_the_remedy(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing.*download the model again"):
            ModelFiles.open(folder).tokenizer()


class TestWeights:
    def test_complete_files_pass(self, folder: Path) -> None:
        ModelFiles.open(folder).check_weights()

    def test_weight_files_come_from_the_index(self, folder: Path) -> None:
        shard(folder, a="model-1.safetensors", b="model-2.safetensors", c="model-1.safetensors")
        files = ModelFiles.open(folder)
        assert [file.name for file in files.weight_files()] == ["model-1.safetensors", "model-2.safetensors"]
        files.check_weights()

    def test_a_missing_shard_is_named(self, folder: Path) -> None:
        shard(folder, a="model-1.safetensors", b="model-2.safetensors")
        (folder / "model-2.safetensors").unlink()
        with pytest.raises(ModelFileError, match=r"model-2\.safetensors is missing.*download"):
            ModelFiles.open(folder).weight_files()

    @pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "..", ""])
    def test_an_index_cannot_refer_outside_the_folder(self, name: str, folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelFileError, match="outside the folder"):
            ModelFiles.open(folder).weight_files()

    def test_an_index_without_a_map_is_named(self, folder: Path) -> None:
        (folder / INDEX).write_text("{}")
        with pytest.raises(ModelFileError, match=r"index\.json has no weight_map"):
            ModelFiles.open(folder).weight_files()

    def test_a_folder_without_weights_says_so(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelFileError, match=r"no weights.*pytorch_model\.bin is a pickle"):
            ModelFiles.open(folder).weight_files()

    @pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
    def test_a_truncated_file_is_reported_by_name(self, kept: int, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(ModelFileError, match=r"model\.safetensors is truncated"):
            ModelFiles.open(folder).check_weights()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"<html>not found</html>", "not a safetensors file"),
            ((2).to_bytes(8, "little") + b"[]", "header is malformed"),
            ((2).to_bytes(8, "little") + b"{]", "header is malformed"),
            ((10).to_bytes(8, "little") + b'{"a": {}} ', "header is malformed"),
            ((31).to_bytes(8, "little") + b'{"a": {"data_offsets": [9, 1]}}', "header is malformed"),
            ((2).to_bytes(8, "little") + b"{}tail", "4 bytes that belong to no tensor"),
        ],
    )
    def test_a_malformed_file_is_named_with_the_reason(self, content: bytes, message: str, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelFileError, match=rf"model\.safetensors.*{message}"):
            ModelFiles.open(folder).check_weights()

    def test_a_dangling_link_is_reported_by_name(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "part.safetensors").symlink_to(folder / "gone")
        with pytest.raises(ModelFileError, match=r"part\.safetensors cannot be read"):
            ModelFiles.open(folder).check_weights()


class TestGguf:
    def test_the_config_has_hugging_face_keys(self, tmp_path: Path) -> None:
        config = gguf_config(tmp_path)
        assert config.pop("rms_norm_eps") == pytest.approx(1e-5)
        assert config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float16",
            "rope_theta": 500_000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": None,
        }

    def test_tensors_determine_what_the_metadata_lacks(self, tmp_path: Path) -> None:
        ones = np.ones(32, dtype=np.float32)
        change = {"output.weight": ones, "blk.0.attn_q.bias": ones, "token_embd.weight": ones.reshape(1, 32)}
        config = ModelFiles.open(write_model(tmp_path / "m.gguf", "qwen2", change=change)).config()
        assert not config["tie_word_embeddings"]
        assert config["attention_bias"]
        assert config["torch_dtype"] == "float32"

    def test_gemma_3_has_interleaved_windows_and_its_own_head_size(self, tmp_path: Path) -> None:
        config = gguf_config(tmp_path, "gemma3", attention__key_length=16, attention__sliding_window=512, block_count=7)
        assert config["model_type"] == "gemma3_text"
        assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (16, 16.0, 512)
        assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]

    def test_a_llama_with_experts_is_mixtral(self, tmp_path: Path) -> None:
        config = gguf_config(tmp_path, expert_count=8, expert_used_count=2)
        assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 8, 2)

    def test_rope_scaling_is_converted(self, tmp_path: Path) -> None:
        config = gguf_config(
            tmp_path, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64
        )
        expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        assert config["rope_scaling"] == expected

    def test_llama_3_is_recognised_by_its_frequencies(self, tmp_path: Path) -> None:
        """The divisors as the checkpoint's authors compute them, one by one."""
        divisors = []
        for dimension in range(0, 8, 2):
            wavelength = 2 * math.pi * 500_000.0 ** (dimension / 8)
            blend = (8192 / wavelength - 1) / 3
            divisors.append(1.0 if blend > 1 else 32.0 if blend < 0 else 1 / ((1 - blend) / 32 + blend))
        change = {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
        config = ModelFiles.open(write_model(tmp_path / "m.gguf", change=change)).config()
        assert config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    def test_other_frequencies_are_refused(self, tmp_path: Path) -> None:
        change = {"rope_freqs.weight": np.array([1, 2, 3, 4], dtype=np.float32)}
        with pytest.raises(UnsupportedModel, match="rope_freqs"):
            ModelFiles.open(write_model(tmp_path / "m.gguf", change=change)).config()

    def test_phi_3_has_its_rope_factors_as_tensors(self, tmp_path: Path) -> None:
        ones = np.ones(4, dtype=np.float32)
        change = {
            "rope_factors_short.weight": ones,
            "rope_factors_long.weight": 2 * ones,
            "phi3.rope.scaling.original_context_length": 64,
        }
        scaling = ModelFiles.open(write_model(tmp_path / "m.gguf", "phi3", change=change)).config()["rope_scaling"]
        assert scaling["rope_type"] == "longrope"
        assert (scaling["short_factor"], scaling["long_factor"]) == ([1.0] * 4, [2.0] * 4)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"block_count": None}, ModelFileError, r"llama\.block_count must be .*, not None"),
            ({"attention__head_count": 0}, ModelFileError, r"head_count must be between 1 and .*, not 0"),
            ({"block_count": 1 << 31}, ModelFileError, r"block_count must be between 1 and 4096, not 2147483648"),
            ({"embedding_length": "wide"}, ModelFileError, r"embedding_length must be .*, not 'wide'"),
            ({"rope__freq_base": math.nan}, ModelFileError, r"freq_base must be a number, not nan"),
            ({"feed_forward_length": [64, 32]}, UnsupportedModel, "differs from layer to layer"),
            ({"rope__scaling__type": "spiral"}, UnsupportedModel, "rope scaling 'spiral'"),
        ],
    )
    def test_invalid_metadata_is_reported_by_name(
        self, change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(error, match=rf"m\.gguf.*{message}"):
            gguf_config(tmp_path, **change)

    def test_an_unknown_architecture_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"'rwkv7'.*llama, qwen2"):
            gguf_config(tmp_path, "rwkv7")

    def test_the_end_of_turn_token_ends_a_generation(self, tmp_path: Path) -> None:
        base = write_model(tmp_path / "base.gguf")
        chat = write_model(tmp_path / "chat.gguf", change={"tokenizer.chat_template": "{{ messages }}"})
        assert ModelFiles.open(base).eos_token_ids() == [2]
        assert ModelFiles.open(chat).eos_token_ids() == [2, 3]

    def test_the_eot_token_of_the_file_ends_a_generation(self, tmp_path: Path) -> None:
        file = write_model(tmp_path / "m.gguf", change={"tokenizer.ggml.eot_token_id": 1})
        assert ModelFiles.open(file).eos_token_ids() == [2, 1]

    def test_the_tokenizer_config_names_tokens_and_template(self, tmp_path: Path) -> None:
        change = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.add_bos_token": True}
        assert ModelFiles.open(write_model(tmp_path / "m.gguf", change=change)).tokenizer_config() == {
            "bos_token": "<s>",
            "eos_token": "<s>",
            "unk_token": None,
            "pad_token": None,
            "add_bos_token": True,
            "add_eos_token": False,
            "model_max_length": 128,
            "chat_template": "{{ messages }}",
        }

    def test_several_chat_templates_come_as_a_list(self, tmp_path: Path) -> None:
        change = {
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
        }
        config = ModelFiles.open(write_model(tmp_path / "m.gguf", change=change)).tokenizer_config()
        assert config["chat_template"] == [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ]

    def test_the_tokenizer_is_built_from_the_file(self, tmp_path: Path) -> None:
        assert ModelFiles.open(write_model(tmp_path / "m.gguf")).tokenizer().encode("ab<s>").ids == [0, 1, 2]

    def test_a_part_of_a_split_model_is_refused(self, tmp_path: Path) -> None:
        file = write_model(tmp_path / "m-00001-of-00003.gguf", change={"split.count": 3})
        with pytest.raises(UnsupportedModel, match="one of 3 parts; merge them"):
            ModelFiles.open(file).check_weights()

    def test_a_file_without_weights_is_refused(self, tmp_path: Path) -> None:
        file = write_model(tmp_path / "m.gguf", change={"token_embd.weight": None})
        with pytest.raises(ModelFileError, match="no weights"):
            ModelFiles.open(file).check_weights()


@pytest.mark.weights
def test_the_real_smollm2_is_complete() -> None:
    try:
        files = ModelFiles.open(hub.resolve(hub.DEFAULT_PACKAGE))
    except ModelNotFound as error:
        pytest.skip(str(error))
    files.check_weights()
    config, texts = files.config(), files.tokenizer_config()
    shape = [config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")]
    assert shape == [30, 576, 9, 3]
    assert files.eos_token_ids() == [2]
    assert texts["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in texts["chat_template"]
