"""No code comes in as data: nothing in the package unpickles, and nothing sends pickles between processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import legato

PACKAGE = Path(legato.__file__).parent
FILES = sorted(str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))
UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "yaml",
    "multiprocessing",  # its pools, queues and pipes pickle what they carry
}  # fmt: skip
UNSAFE_CALLS = {
    "recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "Unpickler", "find_class", "read_pickle", "ProcessPoolExecutor",
}  # fmt: skip
ALLOWED = {
    # The name of an exception that torch.load raises, and a function of ours: torch.load(weights_only=True).
    ("server/convert.py", "pickle"),
    ("server/convert.py", "read_pickle"),
    # Plain data, and only towards the process that is not trusted, never back.
    ("chat/template.py", "marshal"),
    ("chat/worker.py", "marshal"),
    # The load generator and processes that it starts itself, through pipes that have no name.
    ("benchmark/serve/load.py", "multiprocessing"),
}


@cache
def tree(file: str) -> ast.AST:
    return ast.parse((PACKAGE / file).read_text())


def modules(file: str) -> Iterator[str]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


@cache
def calls(file: str) -> list[tuple[str, ast.Call]]:
    found = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    return [(getattr(call.func, "attr", None) or getattr(call.func, "id", ""), call) for call in found]


def constant(call: ast.Call, name: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def test_nothing_is_unpickled() -> None:
    found = {(file, name) for file in FILES for name in modules(file) if name in UNSAFE_MODULES}
    found |= {(file, name) for file in FILES for name, _ in calls(file) if name in UNSAFE_CALLS}
    assert found <= ALLOWED


def test_no_text_is_evaluated() -> None:
    """`model.eval()` does not."""
    evaluate = ("eval", "exec", "compile")
    found = [
        (file, n) for file in FILES for n, call in calls(file) if n in evaluate and isinstance(call.func, ast.Name)
    ]
    assert not found


def test_torch_and_numpy_load_tensors_only() -> None:
    for file in FILES:
        for name, call in calls(file):
            if name == "load" and getattr(getattr(call.func, "value", None), "id", "") == "torch":
                assert constant(call, "weights_only") is True, f"{file}, line {call.lineno}"
            assert not constant(call, "allow_pickle"), f"{file}, line {call.lineno}"


def test_of_pickle_only_an_exception_is_used() -> None:
    found = [node for node in ast.walk(tree("server/convert.py")) if isinstance(node, ast.Attribute)]
    assert {node.attr for node in found if getattr(node.value, "id", "") == "pickle"} == {"UnpicklingError"}


def test_template_processes_are_trusted_with_nothing_but_text() -> None:
    """What comes back from them is not unmarshalled."""
    assert not [call for name, call in calls("chat/template.py") if name == "loads" and "marshal" in ast.dump(call)]
