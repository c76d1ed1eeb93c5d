"""Fail when a document points at nothing.

Checked in every Markdown file at the root and under `docs/`: relative links resolve to a file, anchors to a heading, and every
line `$ windtunnel NAME` in a code fence names a sub-command that exists.

Usage: check_docs.py ROOT
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

_FENCE = re.compile(r"^\s*(```|~~~)")
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_COMMAND = re.compile(r"^\s*\$ windtunnel\s+([a-z][a-z0-9-]*)")
_INLINE_CODE = re.compile(r"`[^`]*`")
_EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


class Broken(NamedTuple):
    path: Path
    line: int
    what: str


class Line(NamedTuple):
    number: int
    text: str
    fenced: bool


def lines_of(text: str) -> Iterator[Line]:
    """Lines with the mark whether they stand in a code fence; the fence lines themselves count as fenced."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
            yield Line(number, line, True)
        else:
            yield Line(number, line, bool(fence))


def anchors(text: str) -> set[str]:
    """The anchors that the forge makes of headings: lower case, punctuation dropped, blanks to hyphens, repeats numbered."""
    seen: dict[str, int] = {}
    out = set()
    for line in lines_of(text):
        heading = None if line.fenced else _HEADING.match(line.text)
        if heading:
            slug = re.sub(r"[^\w\- ]", "", _plain(heading[1]).lower()).replace(" ", "-")
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            out.add(f"{slug}-{count}" if count else slug)
    return out


def _plain(heading: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)


def broken_links(path: Path) -> Iterator[Broken]:
    text = path.read_text(encoding="utf-8")
    for line in lines_of(text):
        if line.fenced:
            continue
        for match in _LINK.finditer(_INLINE_CODE.sub("", line.text)):
            if not _EXTERNAL.match(match[1]) and (reason := _link_fault(path, unquote(match[1]))):
                yield Broken(path, line.number, reason)


def _link_fault(path: Path, target: str) -> str | None:
    name, _, anchor = target.partition("#")
    place = path if not name else path.parent / name
    if not place.exists():
        return f"{target}: no such file"
    if anchor and place.suffix == ".md" and anchor not in anchors(place.read_text(encoding="utf-8")):
        return f"{target}: no such heading"
    return None


def unknown_commands(path: Path, known: frozenset[str]) -> Iterator[Broken]:
    for line in lines_of(path.read_text(encoding="utf-8")):
        match = _COMMAND.match(line.text) if line.fenced else None
        if match and match[1] not in known:
            yield Broken(path, line.number, f"`windtunnel {match[1]}` is not a sub-command")


def sub_commands() -> frozenset[str]:
    """The sub-commands of the command line, by asking it."""
    import typer

    from windtunnel.cli.main import app

    return frozenset(getattr(typer.main.get_command(app), "commands", {}))


def documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("check_docs: give the root folder of the repository", file=sys.stderr)
        return 2
    files, known = documents(Path(arguments[0])), sub_commands()
    found = [fault for path in files for fault in (*broken_links(path), *unknown_commands(path, known))]
    for fault in found:
        print(f"{fault.path}:{fault.line}: {fault.what}")
    print(f"check_docs: {len(files)} files, {len(known)} sub-commands, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
