"""Tokenizers of SentencePiece models, each as its class in transformers has it.

The file has the pieces. What a class adds: tokens that are not in the file, how spaces are marked, and what stands
before and behind a text.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from legato.common.errors import UnsupportedModel
from legato.modelfiles.tokenizers import merges_from_scores
from legato.modelfiles.vocabularies.sentencepiece import SentencePieceModel, TokenType
from legato.modelfiles.vocabularies.special import TokenizerSettings

SPACE = "\u2581"
# Tokens of CodeLlama for filling in the middle; not all of its vocabularies have them.
INFILL = ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>")
T5_EXTRA_IDS = 100
PEGASUS_OFFSET = 103


def t5(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    """T5 and mT5: the vocabulary ends with sentinels, texts with their end."""
    count = int(settings.config.get("extra_ids", T5_EXTRA_IDS))
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(count))]
    tokenizer = _unigram(model, _scored(model) + [(name, 0.0) for name in sentinels], model.unk_id)
    if model.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace("always")])
    tokenizer.decoder = decoders.Metaspace(SPACE, "always", True)
    roles = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    settings.add_to(tokenizer, dict(roles), [*_whole_pieces(model), *map(_plain_special, sentinels)])
    settings.frame(tokenizer, bos=None, eos="</s>")
    return tokenizer


def pegasus(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    """The file's pieces stand behind tokens that only its training used."""
    offset = int(settings.config.get("offset", PEGASUS_OFFSET))
    roles = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask_2>"}
    named = [settings.role(role, roles[role]) or roles[role] for role in ("pad", "eos")]
    masks = [str(settings.config.get("mask_token_sent", "<mask_1>")), settings.role("mask", roles["mask"]) or ""]
    unused = [f"<unk_{number}>" for number in range(2, offset)]
    before = [(name, 0.0) for name in [*named, *masks]] + [(name, -100.0) for name in unused]
    tokenizer = _unigram(model, before + _scored(model)[2:], len(before) + model.unk_id - 2)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(model.charsmap) if model.charsmap else normalizers.Replace(Regex(r"\n"), " "),
            normalizers.Replace(Regex(r" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = _metaspace("always")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always", True)
    settings.add_to(tokenizer, dict(roles), [*_whole_pieces(model), *map(_plain_special, [masks[0], *unused])])
    settings.frame(tokenizer, bos=None, eos=named[1])
    return tokenizer


def llama(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    """Llama 1 and 2, Mistral, Phi-3. `legacy` tokenizers put a space behind every special token, too."""
    has_prefix = settings.config.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.flag("legacy") else "first") if has_prefix else "never"
    tokenizer = _bpe(model)
    tokenizer.pre_tokenizer = _metaspace(scheme, split=False)
    tokenizer.decoder = _decoder(strips=has_prefix)
    _finish(tokenizer, model, settings, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"})
    return tokenizer


def code_llama(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    has_prefix = settings.config.get("add_prefix_space") in (None, True)
    tokenizer = _bpe(model)
    tokenizer.pre_tokenizer = _metaspace("first" if has_prefix else "never", split=False)
    tokenizer.decoder = _decoder(strips=True)
    known = {piece.text for piece in model.pieces}
    infill = [_plain_special(token) for token in INFILL if token in known]
    _finish(tokenizer, model, settings, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}, infill)
    return tokenizer


def gemma(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    tokenizer = _bpe(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _decoder(strips=False)
    roles = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    _finish(tokenizer, model, settings, dict(roles))
    return tokenizer


def plain(model: SentencePieceModel, settings: TokenizerSettings) -> Tokenizer:
    """As the file itself says, which is what SentencePiece does: Baichuan, and whoever has no class of its own."""
    tokenizer = _unigram(model, _scored(model), model.unk_id) if model.is_unigram else _bpe(model)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:  # behind a special token, too: it is known only here where a text begins
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _decoder(strips=model.add_dummy_prefix)
    _finish(tokenizer, model, settings, {"unk": model.unk_piece}, add_bos=False)
    return tokenizer


def _scored(model: SentencePieceModel) -> list[tuple[str, float]]:
    return [(piece.text, piece.score) for piece in model.pieces]


def _unigram(model: SentencePieceModel, vocabulary: list[tuple[str, float]], unk_id: int) -> Tokenizer:
    if not model.is_unigram:
        raise UnsupportedModel("the class of this tokenizer needs a unigram model, and its file has merges")
    return Tokenizer(Unigram(vocabulary, unk_id, model.byte_fallback))


def _bpe(model: SentencePieceModel) -> Tokenizer:
    if model.is_unigram:
        raise UnsupportedModel("the class of this tokenizer needs a BPE model, and its file is a unigram model")
    ids: dict[str, int] = {}
    for number, piece in enumerate(model.pieces):
        ids.setdefault(piece.text, number)
    merges = merges_from_scores({piece.text: piece.score for piece in model.pieces if piece.kind == TokenType.NORMAL})
    unknown = model.pieces[model.unk_id].text
    return Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback))


def _metaspace(scheme: str, split: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(SPACE, scheme, split)


def _decoder(strips: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)


def _finish(
    tokenizer: Tokenizer,
    model: SentencePieceModel,
    settings: TokenizerSettings,
    roles: dict[str, str | None],
    extra: list[AddedToken] | None = None,
    add_bos: bool = True,
) -> None:
    """Special tokens, and what stands before and behind a text."""
    settings.add_to(tokenizer, roles, [*_whole_pieces(model), *(extra or [])])
    bos = settings.role("bos", roles.get("bos")) if settings.flag("add_bos_token", add_bos) else None
    eos = settings.role("eos", roles.get("eos")) if settings.flag("add_eos_token") else None
    settings.frame(tokenizer, bos=bos, eos=eos)


def _whole_pieces(model: SentencePieceModel) -> list[AddedToken]:
    """Pieces that are found in a text before it is cut: control pieces are special, a user's own are not."""
    whole = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [
        AddedToken(piece.text, normalized=False, special=piece.kind == TokenType.CONTROL)
        for piece in model.pieces
        if piece.kind in whole
    ]


def _plain_special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)
