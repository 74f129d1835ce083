"""The options of the task: generation or embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato.common.errors import OptionError
from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Options):
    """Task"""

    task: Literal["generate", "embed"] = option(
        "generate",
        "What the model does: `generate` text, or `embed` texts (embeddings, re-ranking and classification, with"
        " encoders such as BERT and embedding models such as Qwen3-Embedding). The router gets the value from the"
        " shards.",
    )
    pooling: Literal["mean", "cls", "last"] | None = option(
        None,
        "With `--task embed`: how the token vectors of a text are combined into one. Default: the value in the"
        " checkpoint's `1_Pooling/config.json`; without that file `mean` for encoders and `last` for decoders.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling is not None and self.task != "embed":
            raise OptionError("--pooling is for embeddings: add --task embed")
