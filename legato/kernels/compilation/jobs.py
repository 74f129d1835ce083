"""One variant of a kernel as text, for another process to compile into Triton's cache on disk.

A job names a kernel of this package and has numbers and strings: no code is sent. What is decoded must be exactly what
was encoded, tuples and kinds of numbers included, since Triton's cache looks a kernel up by the text of all of it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from typing import Any

PACKAGE = "legato."


def encode(src: Any, target: Any, options: dict[str, Any]) -> bytes | None:
    """What Triton's `compile` was called with. None where that cannot be said in numbers and strings."""
    kernel = src.fn
    module, name = kernel.fn.__module__, kernel.fn.__qualname__
    if not module.startswith(PACKAGE) or getattr(sys.modules.get(module), name, None) is not kernel:
        return None
    facts = {
        "kernel": [module, name],
        "source": [type(src).__module__, type(src).__qualname__],
        "signature": src.signature,
        "constants": [[list(path), value] for path, value in src.constants.items()],
        "attributes": [[list(path), value] for path, value in src.attrs.items()],
        "target": [target.backend, target.arch, target.warp_size],
        "options": options,
    }
    try:
        job = json.dumps(facts).encode()
    except (TypeError, ValueError):
        return None
    return job if _described(*decode(job)) == _described(src, target, options) else None


def decode(job: bytes) -> tuple[Any, Any, dict[str, Any]]:
    """The source, the target and the options."""
    from triton.backends.compiler import GPUTarget

    facts = json.loads(job)
    (module, name), (source_module, source_name) = facts["kernel"], facts["source"]
    if not module.startswith(PACKAGE) or not source_module.startswith("triton."):
        raise ValueError(f"{module} and {source_module}: a job has a kernel of this package and a source of Triton")
    source = getattr(importlib.import_module(source_module), source_name)
    src = source(
        getattr(importlib.import_module(module), name),
        _with_tuples(facts["signature"]),
        {tuple(path): _with_tuples(value) for path, value in facts["constants"]},
        {tuple(path): value for path, value in facts["attributes"]},
    )
    return src, GPUTarget(*facts["target"]), _with_tuples(facts["options"])


def compile_job(job: bytes) -> None:
    """Into Triton's cache. Asks no driver for a device: the job has the target."""
    import triton
    from triton.runtime import driver

    src, target, options = decode(job)
    driver.set_active(_TargetOnly(target))
    triton.compile(src, target=target, options=options)


def uses_cache() -> bool:
    """Whether Triton looks for kernels on disk, where another process may have put them."""
    from triton import knobs

    return not knobs.compilation.always_compile


def is_cached(src: Any, target: Any, options: dict[str, Any], environment: dict[str, str] | None = None) -> bool:
    """Whether Triton's `compile` would find the kernel on disk."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    if not uses_cache():
        return False
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    variables = get_cache_invalidating_env_vars() if environment is None else environment
    key = get_cache_key(src, backend, parsed, variables)
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    metadata = f"{src.name[:150]}.json"
    return metadata in (manager.get_group(metadata) or {})


class _TargetOnly:
    """A driver that knows which device there is and cannot reach it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


def _described(src: Any, target: Any, options: dict[str, Any]) -> str:
    return repr((src.fn, type(src), src.signature, src.constants, src.attrs, target, options))


def _with_tuples(value: Any) -> Any:
    """JSON has lists instead, of which Triton has none here."""
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
