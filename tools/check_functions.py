"""Fail when a function is longer than its limit.

Counted are the lines from `def` (decorators excluded) to the end of the body, without the docstring. Nested functions count
for themselves and for the function around them.

Usage: check_functions.py PATH…
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT = 70

Function = ast.FunctionDef | ast.AsyncFunctionDef


class LongFunction(NamedTuple):
    path: Path
    line: int
    name: str
    lines: int


def lines_of(function: Function) -> int:
    """The lines of signature and body, docstring excluded."""
    first = function.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if is_doc else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def long_functions(path: Path, limit: int = LIMIT) -> Iterator[LongFunction]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, Function) and (lines := lines_of(node)) > limit:
            yield LongFunction(path, node.lineno, node.name, lines)


def python_files(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        yield from sorted(root.rglob("*.py")) if root.is_dir() else [root]


def main(arguments: list[str]) -> int:
    missing = [name for name in arguments if not Path(name).exists()]
    if missing or not arguments:
        print(f"check_functions: no such path: {', '.join(missing) or '(none given)'}", file=sys.stderr)
        return 2
    files = list(python_files([Path(name) for name in arguments]))
    found = [function for path in files for function in long_functions(path)]
    for function in found:
        print(f"{function.path}:{function.line}: {function.name} has {function.lines} lines; the limit is {LIMIT}")
    print(f"check_functions: {len(files)} files, {len(found)} functions over {LIMIT} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
