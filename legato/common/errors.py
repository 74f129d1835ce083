"""The errors a person can cause, as a tree.

    LegatoError                 ends a program with one line and exit code 1
    ├── OptionError             a flag or environment variable is wrong
    ├── ModelError              the model cannot be served
    │   ├── ModelNotFound       no such folder, file or repository
    │   ├── ModelFileError      a file of the model is missing, cut off or malformed
    │   └── UnsupportedModel    well-formed, but not something Legato runs
    └── EndpointInUse           a port or socket belongs to another process

Errors of requests live with the router (`api/errors.py`); impossible states are asserts.
"""

from __future__ import annotations


class LegatoError(Exception):
    """A message for a person: names the flag or file and, where there is one, the cure."""


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


class EndpointInUse(LegatoError):
    pass
