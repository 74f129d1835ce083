"""Proofs that both ends of a connection know the cluster key. The key itself never travels.

    listener   hello, nonce A                        37 bytes
    caller     hello, nonce B, HMAC(key, "caller" A B)   69 bytes
    listener   HMAC(key, "listener" A B)             32 bytes

Until the caller's proof is right, the listener has read 69 bytes, compared them, and done nothing else. Nonces are new
for every connection, so that a recorded proof is worth nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from pathlib import Path

from legato.common.errors import LegatoError, OptionError

MIN_KEY = 16
VERSION = 1
_HELLO = struct.Struct("<4sB")
_MAGIC = b"LGTO"
_NONCE, _PROOF = 32, 32
CHALLENGE_SIZE = _HELLO.size + _NONCE
REPLY_SIZE = CHALLENGE_SIZE + _PROOF
PROOF_SIZE = _PROOF


class WrongKey(LegatoError):
    """The other end does not know the cluster key."""


class ForeignProtocol(LegatoError):
    """The other end is no Legato, or one of another version."""


def challenge() -> bytes:
    return _HELLO.pack(_MAGIC, VERSION) + secrets.token_bytes(_NONCE)


def reply_to(key: bytes, received: bytes) -> tuple[bytes, bytes]:
    """What a caller sends, and the proof that it must get for it."""
    _check_hello(received)
    ours = _HELLO.pack(_MAGIC, VERSION) + secrets.token_bytes(_NONCE)
    nonces = received[_HELLO.size :] + ours[_HELLO.size :]
    return ours + _proof(key, b"caller", nonces), _proof(key, b"listener", nonces)


def prove_to(key: bytes, sent: bytes, reply: bytes) -> bytes:
    """What the listener that has `sent` a challenge answers to a right reply. WrongKey, ForeignProtocol."""
    _check_hello(reply)
    nonces = sent[_HELLO.size :] + reply[_HELLO.size : CHALLENGE_SIZE]
    check_proof(_proof(key, b"caller", nonces), reply[CHALLENGE_SIZE:])
    return _proof(key, b"listener", nonces)


def check_proof(expected: bytes, received: bytes) -> None:
    if not hmac.compare_digest(expected, received):
        raise WrongKey("the other end does not know the cluster key (--cluster-key)")


def read_key(given: str | None, file: str | None) -> str | None:
    """The key of `--cluster-key` or `--cluster-key-file`."""
    if given is not None and file is not None:
        raise OptionError("--cluster-key and --cluster-key-file are both set: keep one")
    if file is not None:
        try:
            given = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise OptionError(f"--cluster-key-file {file}: {reason}") from None
    if given is not None and len(given) < MIN_KEY:
        raise OptionError(f"the cluster key has {len(given)} characters: it needs at least {MIN_KEY}")
    return given


def _check_hello(received: bytes) -> None:
    magic, version = _HELLO.unpack_from(received)
    if magic != _MAGIC:
        raise ForeignProtocol("the other end is not a Legato server")
    if version != VERSION:
        raise ForeignProtocol(f"the other end uses version {version} of the cluster protocol, this machine {VERSION}")


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, hashlib.sha256)
