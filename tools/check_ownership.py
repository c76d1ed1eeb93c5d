"""Fail when the stream path can name a request, a response or a connection.

What outlives a handler owns its inputs by value (`docs/design.md`, "Ownership of a response"). So in the places of
`GUARDED` no import and no annotation of a parameter, result, variable or attribute, string annotations included, names
anything from the tables below. The type checker makes sure that nothing else gets in under another name.

Usage: check_ownership.py SRC        (the folder that holds `windtunnel/`)
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GUARDED = (
    "windtunnel/core",
    "windtunnel/wire",
    "windtunnel/serve/streams.py",
    "windtunnel/serve/fetched.py",
    "windtunnel/serve/jobs.py",
    "windtunnel/serve/driver.py",
)

FORBIDDEN_NAMES: dict[str, str] = {
    "Request": "an HTTP request",
    "HTTPConnection": "an HTTP connection",
    "ClientLine": "the client's connection",
    "ChunkSink": "a connection (take the protocol Sink)",
    "Connection": "a connection",
    "HandlerRequest": "the handler's request",
    "HandlerResponse": "the handler's response",
    "Response": "an HTTP response",
    "JSONResponse": "an HTTP response",
    "PlainTextResponse": "an HTTP response",
    "StreamingResponse": "an HTTP response",
    "StreamResponse": "an HTTP response",
    "RequestResponseCycle": "uvicorn's request and response in one object",
    "HttpToolsProtocol": "a connection",
    "H11Protocol": "a connection",
    "BaseTransport": "a connection",
    "Transport": "a connection",
    "WriteTransport": "a connection",
    "StreamWriter": "a connection",
    "StreamReader": "a connection",
    "ASGIReceiveCallable": "the handler's way to its connection",
    "ASGISendCallable": "the handler's way to its connection",
    "Receive": "the handler's way to its connection",
    "Send": "the handler's way to its connection",
    "Scope": "the handler's request",
    "ServicerContext": "a gRPC call",
    "socket": "a connection",
}

FORBIDDEN_MODULES: dict[str, str] = {
    "starlette": "requests and responses",
    "uvicorn": "connections",
    "httptools": "connections",
    "h11": "connections",
    "aiohttp": "requests and responses",
    "asgiref": "requests and responses",
    "socket": "connections",
    "windtunnel.serve.app": "the handlers",
    "windtunnel.serve.asgi": "the handlers",
    "windtunnel.serve.generate": "the handlers",
    "windtunnel.serve.http11": "the connections",
    "windtunnel.serve.middleware": "the handlers",
    "windtunnel.serve.operations": "the handlers",
    "windtunnel.serve.server": "the connections",
}


class Breach(NamedTuple):
    path: Path
    line: int
    what: str


def guarded_files(source: Path) -> Iterator[Path]:
    for name in GUARDED:
        place = source / name
        if place.is_dir():
            yield from sorted(place.rglob("*.py"))
        elif place.exists():
            yield place


def breaches(path: Path) -> Iterator[Breach]:
    """Every import and annotation of `path` that names something from the tables."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        for name, line in _imported(node):
            reason = _module_reason(name) or FORBIDDEN_NAMES.get(name.rpartition(".")[2])
            if reason:
                yield Breach(path, line, f"imports {name}: {reason}")
        for annotation in _annotations(node):
            for name in _names(annotation):
                if name in FORBIDDEN_NAMES:
                    yield Breach(path, annotation.lineno, f"names {name}: {FORBIDDEN_NAMES[name]}")


def _module_reason(name: str) -> str | None:
    return next((why for module, why in FORBIDDEN_MODULES.items() if name == module or name.startswith(module + ".")), None)


def _imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.arg) and node.annotation:
        yield node.annotation
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
        yield node.returns
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp):
        yield node.value  # perhaps an alias of a type


def _names(annotation: ast.expr) -> Iterator[str]:
    """Identifiers of an annotation, those inside string annotations included."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _names_in_string(node.value)


def _names_in_string(text: str) -> Iterator[str]:
    try:
        inner = ast.parse(text, mode="eval").body
    except SyntaxError:
        return
    if not isinstance(inner, ast.Constant):
        yield from _names(inner)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / "windtunnel").is_dir():
        print("check_ownership: give the folder that holds windtunnel/, such as src", file=sys.stderr)
        return 2
    files = list(guarded_files(Path(arguments[0])))
    found = [breach for path in files for breach in breaches(path)]
    for breach in found:
        print(f"{breach.path}:{breach.line}: the stream path {breach.what}")
    print(f"check_ownership: {len(files)} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
