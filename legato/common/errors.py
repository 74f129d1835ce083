"""Errors that a user can cause.

    LegatoError                 ends a program with one line and exit code 1, unless it has another
    ├── OptionError             a flag or environment variable is invalid
    ├── ModelError              the model cannot be served
    │   ├── ModelNotFound       no such folder, file or repository
    │   ├── ModelFileError      a file of the model is missing, truncated or malformed
    │   └── UnsupportedModel    valid, but not supported by Legato
    ├── EndpointInUse           a port or socket is in use by another process
    └── TooManyRestarts         in `restarts.py`

Request errors are in `api/errors.py`; impossible states are asserts.
"""

from __future__ import annotations

from typing import ClassVar


class LegatoError(Exception):
    """A message for the user that names the flag or file and, if there is one, the remedy."""

    exit_code: ClassVar[int] = 1


class OptionError(LegatoError):
    pass


class ModelError(LegatoError):
    pass


class ModelNotFound(ModelError):
    pass


class ModelFileError(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class TooManyShards(UnsupportedModel):
    """Some would have no head."""


class EndpointInUse(LegatoError):
    pass
