"""The model and build information of `/info`. It does not query the Hub, so it also works offline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legato.modelfiles.files import ModelFiles
from legato.vision.rules import image_rules

_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_sha(model: Path) -> str | None:
    """The commit of a Hub repository. Its cache keeps a snapshot in `snapshots/COMMIT`."""
    folders = (model, *model.parents[:1])
    return next((f.name for f in folders if f.parent.name == "snapshots" and _COMMIT.fullmatch(f.name)), None)


def pipeline_tag(model: Path, *, from_hub: bool, has_encoder: bool, cache: Path | None = None) -> str | None:
    """The Hub's name for what the model does, by its configuration. `POST /` repeats the prompt in its answer only for
    text generation, so that images in prompts are not returned."""
    if has_encoder:
        return "text2text-generation"
    if image_rules(ModelFiles.open(model, cache)) is not None:
        return "image-text-to-text"
    return "text-generation" if from_hub else None  # as in TGI, a folder has no tag


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Commit and label of the image that this runs in, which the Dockerfile writes into its environment."""

    sha: str | None
    docker_label: str | None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> BuildInfo:
        return cls(environ.get("GIT_SHA") or None, environ.get("DOCKER_LABEL") or None)
