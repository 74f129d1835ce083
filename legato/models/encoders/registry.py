"""Which class embeds which `model_type`, and how a model is put together from its files."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.modelfiles.embedding import EmbeddingFiles, Pooling
from legato.modelfiles.files import ModelFiles
from legato.models.checkpoint import Progress
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.encoders.batch import EncodedText, TextBatch
from legato.models.encoders.pooling import DenseModule, PoolingHead, TextHead
from legato.models.registry import open_source
from legato.models.weights import Weights

logger = logging.getLogger(__name__)

ENCODERS = {
    "bert": "legato.models.encoders.bert:Bert",
    "llama": "legato.models.encoders.decoders:EmbeddingDecoder",
    "mistral": "legato.models.encoders.decoders:EmbeddingDecoder",
    "modernbert": "legato.models.encoders.modernbert:ModernBert",
    "qwen2": "legato.models.encoders.decoders:EmbeddingDecoder",
    "qwen3": "legato.models.encoders.decoders:EmbeddingDecoder",
    "roberta": "legato.models.encoders.bert:Roberta",
    "xlm-roberta": "legato.models.encoders.bert:Roberta",
}


class Encoder(Protocol):
    """What the server needs of an architecture. Its constructor takes `(config: ModelConfig, weights: Weights)`."""

    hidden_size: int
    vocab_size: int
    max_tokens: int  # the most that a text may have
    default_pooling: Pooling  # where neither a file nor a flag says which

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """The vectors of all tokens, [T, hidden_size]."""
        ...

    def classifier(self, weights: Weights, num_labels: int) -> TextHead: ...

    def skip_unused(self, weights: Weights) -> None:
        """The tensors that only a classifier needs."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """An encoder and what makes vectors of texts from its vectors of tokens."""

    encoder: Encoder
    head: TextHead
    pooling: Pooling
    is_classifier: bool
    max_tokens: int  # of a text, unless --max-input-tokens asks for more
    device: torch.device

    @torch.inference_mode()
    def vectors(self, texts: list[EncodedText]) -> torch.Tensor:
        """[texts, size] in float32, on the host."""
        batch = TextBatch(texts, self.device)
        found = self.head(self.encoder.forward(batch), batch).float()
        ordered = torch.empty_like(found)
        ordered[torch.tensor(batch.order, device=self.device)] = found
        return ordered.cpu()


def load_encoder(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pooling: Pooling | None = None,
    dummy: bool = False,
    progress: Progress | None = None,
) -> EmbeddingModel:
    """`pooling` is what --pooling says; the checkpoint's files say it otherwise."""
    model_type, described = str(files.config().get("model_type")), EmbeddingFiles.read(files)
    if model_type not in ENCODERS:
        raise UnsupportedModel(
            f"model_type '{model_type}' is not supported with --task embed; supported: {', '.join(sorted(ENCODERS))}"
        )
    if files.quantization() is not None or files.weight_format == "gguf":
        raise UnsupportedModel("quantized checkpoints and GGUF files are not supported with --task embed")
    config = ModelConfig.from_hf(files.config())
    weights = DummyWeights(dtype, device) if dummy else Weights(open_source(files), dtype, device, None, progress)
    module, _, name = ENCODERS[model_type].partition(":")
    encoder: Encoder = getattr(importlib.import_module(module), name)(config, weights)
    head: TextHead
    if described.labels is not None:
        if pooling is not None:
            raise OptionError("--pooling: the model is a classifier, whose head has its own pooling")
        chosen: Pooling = encoder.default_pooling
        head = encoder.classifier(weights, len(described.labels))
    else:
        chosen = _chosen_pooling(pooling, described, encoder)
        encoder.skip_unused(weights)
        modules = [DenseModule(folder, device) for folder in described.dense]
        head = PoolingHead(chosen, encoder.hidden_size, modules)
    if not dummy:
        weights.check_all_used()
    longest = min(encoder.max_tokens, described.max_tokens or encoder.max_tokens)
    if longest < 1:
        raise ModelFileError(f"config.json leaves no position for tokens: max_position_embeddings is {longest}")
    return EmbeddingModel(encoder, head, chosen, described.labels is not None, longest, device)


def _chosen_pooling(given: Pooling | None, described: EmbeddingFiles, encoder: Encoder) -> Pooling:
    if given is not None or described.pooling is not None:
        return given or described.pooling or encoder.default_pooling
    logger.warning(
        "The checkpoint does not define its pooling (modules.json, 1_Pooling/config.json): using %s; --pooling"
        " overrides it",
        encoder.default_pooling,
    )
    return encoder.default_pooling
