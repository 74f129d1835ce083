"""Checks whether a model can verify drafts, and loads `--speculate-model`: a draft model with the same tokenizer as the
model, or an EAGLE-3 head."""

from __future__ import annotations

import torch

from legato.common.errors import OptionError
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.locate import cache_of, locate_draft
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.decoder import Decoder
from legato.models.eagle import load_eagle3
from legato.models.host import on_host
from legato.models.registry import CausalModel, get_model, model_config
from legato.server.speculation.draft_model import MOST_TOKENS
from legato.server.speculation.guessers import EagleGuesser, Guesser, SmallModel

FLAG = "--speculate-model"


def why_no_drafts(model: CausalModel, options: ServerOptions) -> str | None:
    """What to say if drafts are asked for that cannot be verified. If they are not, there are none by default."""
    if model.config.decoder_start_token_id is not None:
        return "--speculate is not supported for encoder-decoder models"
    if model.kv_shape.keeps_states:
        return f"--speculate: model_type '{model.config.model_type}' keeps a state, which drafts would change"
    if options.pipeline_parallel_size > 1:
        return "--speculate cannot be combined with --pipeline-parallel-size"
    return None


def load_draft(
    options: ServerOptions,
    base_files: ModelFiles,
    base: CausalModel,
    has_speculator: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Guesser | None:
    """Every shard has all of it: it is small, and all shards see the same tokens."""
    if options.speculate_model is None:
        return None
    if has_speculator:
        raise OptionError(
            f"{FLAG}: --model-id names a speculator, which already proposes drafts; give only one of them"
        )
    if options.speculate == 0:
        raise OptionError(f"{FLAG}: --speculate 0 disables drafts; leave out one of them")
    if (options.speculate or 0) > MOST_TOKENS:
        raise OptionError(f"--speculate {options.speculate}: a draft model proposes at most {MOST_TOKENS} tokens")
    path = locate_draft(options.speculate_model, options)
    head = SpeculatorFiles.find(path)
    if head is not None and head.kind != "eagle3":
        raise OptionError(
            f"{FLAG}: {path} is a {head.kind} checkpoint, which names its base model: give it as --model-id"
        )
    if head is not None:
        loaded = load_eagle3(head, base, dtype, device)
        assert isinstance(base, Decoder)
        return EagleGuesser(loaded, base)
    files = ModelFiles.open(path, cache_of(options))
    config = model_config(files, trust_remote_code=options.trust_remote_code)
    if config.decoder_start_token_id is not None:
        raise OptionError(f"{FLAG}: {files.path} is an encoder-decoder model, which cannot be a draft model")
    _check_vocabulary(files, base_files)
    packs = device.type == "cpu" and options.dtype is None
    model = get_model(
        files,
        config,
        dtype,
        device,
        dummy=options.load_format == "dummy",
        trust_remote_code=options.trust_remote_code,
        packs=packs,
    )
    if model.kv_shape.keeps_states:
        raise OptionError(f"{FLAG}: model_type '{config.model_type}' keeps a state, which rejected drafts would change")
    return SmallModel(on_host(model) if packs else model)


def _check_vocabulary(draft: ModelFiles, base: ModelFiles) -> None:
    """A token must have the same number in both: text is never looked at."""
    ours = {number: token for token, number in base.tokenizer().get_vocab().items()}
    theirs = draft.tokenizer().get_vocab()
    for token, number in theirs.items():
        if ours.get(number, token) != token:
            raise OptionError(
                f"{FLAG}: {draft.path} has a different tokenizer from {base.path}: token {number} is {token!r} in one"
                f" and {ours[number]!r} in the other"
            )
    if sum(number in ours for number in theirs.values()) < len(ours) // 2:
        raise OptionError(
            f"{FLAG}: {draft.path} has a different tokenizer from {base.path}: it lacks most of its tokens"
        )
