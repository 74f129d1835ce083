"""The rules of CONTRIBUTING.md that a program can check: sizes of files, functions and folders, names of classes."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "legato"
MAX_LINES, MIN_LINES, MAX_FUNCTION_LINES, MAX_MODULES = 400, 25, 60, 20
# One file per architecture.
ARCHITECTURES = PACKAGE / "models"


def modules() -> list[Path]:
    generated = PACKAGE / "pb"
    return [path for path in sorted(PACKAGE.rglob("*.py")) if generated not in path.parents]


def parsed() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in modules()}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_files_have_25_to_400_lines() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    small = {name: length for name, length in lengths.items() if length < MIN_LINES and not name.endswith("__.py")}
    assert small == {}


def test_folders_have_at_most_20_modules() -> None:
    counts = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > MAX_MODULES and folder != ARCHITECTURES} == {}


def test_functions_have_at_most_60_lines() -> None:
    """Without their docstring and parameters. Kernels are excepted: what they call is compiled into them anyway."""
    long = {}
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{name}: {node.name}"] = length
    assert long == {}


def test_public_class_names_occur_once() -> None:
    places = defaultdict(list)
    for name, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
