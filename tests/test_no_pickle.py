"""No code comes in as data: nothing in the package unpickles, and nothing sends pickles between processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import legato

PACKAGE = Path(legato.__file__).parent
FILES = sorted(str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))
UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "yaml",
}
# Process pools, queues and pipes of this module pickle what they carry.
UNSAFE_MODULES |= {"multiprocessing"}
UNSAFE_CALLS = {
    "recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "Unpickler", "find_class", "read_pickle", "ProcessPoolExecutor",
}  # fmt: skip
ALLOWED = {
    # The name of an exception that torch.load raises.
    ("server/convert.py", "pickle"),
    # Plain data, and only towards the process that is not trusted, never back.
    ("chat/template.py", "marshal"),
    ("chat/worker.py", "marshal"),
    # The load generator and processes that it starts itself, through pipes that have no name.
    ("benchmark/serve/load.py", "multiprocessing"),
    # A function of ours: torch.load(weights_only=True) with good errors.
    ("server/convert.py", "read_pickle"),
}


def tree(file: str) -> ast.AST:
    return ast.parse((PACKAGE / file).read_text())


def modules(file: str) -> Iterator[str]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


def calls(file: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            yield name, node


def constant(call: ast.Call, name: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_unpickled(file: str) -> None:
    found = {(file, name) for name in modules(file) if name in UNSAFE_MODULES}
    found |= {(file, name) for name, _ in calls(file) if name in UNSAFE_CALLS | {"eval", "exec"}}
    own = {(file, "eval") for name, call in calls(file) if name == "eval" and isinstance(call.func, ast.Attribute)}
    assert found - own <= ALLOWED  # `model.eval()` is no evaluation of text


@pytest.mark.parametrize("file", FILES)
def test_torch_and_numpy_load_tensors_only(file: str) -> None:
    for name, call in calls(file):
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if name == "load" and owner == "torch":
            assert constant(call, "weights_only") is True, f"line {call.lineno}"
        assert not constant(call, "allow_pickle"), f"line {call.lineno}"


def test_of_pickle_only_an_exception_is_used() -> None:
    used = {
        node.attr
        for node in ast.walk(tree("server/convert.py"))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle"
    }
    assert used == {"UnpicklingError"}


def test_templates_processes_are_trusted_with_nothing_but_text() -> None:
    """What comes back from them is not unmarshalled."""
    assert not [
        call for name, call in calls("chat/template.py") if name in ("loads", "load") and "marshal" in ast.dump(call)
    ]
