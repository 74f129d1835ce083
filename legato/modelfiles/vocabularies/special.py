"""The tokens that a model's files add to its vocabulary, and those that have a role: the beginning of a text, its end,
padding …

They are in tokenizer_config.json; before it had `added_tokens_decoder`, in added_tokens.json and
special_tokens_map.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from legato.common.errors import ModelFileError

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The settings in tokenizer_config.json and related files."""

    path: Path  # of the model, for messages
    config: dict[str, Any]
    added: dict[int, AddedToken]  # by id
    extra: tuple[AddedToken, ...]  # special ones without a role

    @classmethod
    def of(cls, path: Path, config: dict[str, Any], added: dict[str, Any], roles: dict[str, Any]) -> TokenizerSettings:
        """`config`, `added` and `roles` are tokenizer_config.json, added_tokens.json and special_tokens_map.json."""
        try:
            if "added_tokens_decoder" in config:
                by_id = {int(number): _added(token) for number, token in config["added_tokens_decoder"].items()}
            else:
                config = {**config, **roles}
                special = {_added(config[f"{role}_token"]).content for role in ROLES if config.get(f"{role}_token")}
                by_id = {
                    int(number): AddedToken(text, special=text in special, normalized=text not in special)
                    for text, number in added.items()
                }
            extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
            extra = list(extra.values()) if isinstance(extra, dict) else extra
            return cls(path, config, by_id, tuple(map(_special, extra)))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ModelFileError(f"{path}: the special tokens of its tokenizer are malformed: {error}") from None

    def role(self, name: str, default: str | None = None) -> str | None:
        """The text of the token with this role."""
        token = self._role(name, default)
        return None if token is None else token.content

    def numbered(self, tokenizer: Tokenizer, name: str, default: str) -> tuple[str, int]:
        """The token with this role and its id, of a tokenizer that has it."""
        text = self.role(name, default) or default
        number = tokenizer.token_to_id(text)
        assert number is not None, f"{text} was added"
        return text, number

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.config.get(name, default))

    def _role(self, name: str, default: str | None) -> AddedToken | None:
        value = self.config.get(f"{name}_token", default)
        if not value:
            return None
        text = _added(value).content
        known = next((token for token in self.added.values() if token.content == text), None)
        return known if known is not None else _special(value)

    def add_to(self, tokenizer: Tokenizer, defaults: dict[str, str | None], extra: Iterable[AddedToken] = ()) -> None:
        """Add all of them. `defaults` are the tokens of roles that the files do not mention, `extra` those that the
        vocabulary has besides."""
        tokens = [token for _, token in sorted(self.added.items())]
        tokens += [_special(token) for role in ROLES if (token := self._role(role, defaults.get(role))) is not None]
        tokens += [*self.extra, *extra]
        unique: dict[str, AddedToken] = {}
        for token in tokens:
            unique.setdefault(token.content, token)
        tokenizer.add_tokens(list(unique.values()))
        for number, token in self.added.items():
            if (found := tokenizer.token_to_id(token.content)) != number:
                raise ModelFileError(f"{self.path}: the token {token.content!r} should be {number}, but is {found}")

    def frame(self, tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
        """Put these tokens before and behind every text."""
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
        special = [(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _added(value: Any) -> AddedToken:
    """A token as the files have it: a string, or an object."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value)
    return AddedToken(**{key: each for key, each in value.items() if key != "__type"})


def _special(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    token = _added(value)
    token.special = True
    return token
