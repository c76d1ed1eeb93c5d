"""A peer's page, docs/compat/NAME.md: people write it but for what stands between the two marks, which a run gives."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.compat.modes import Mode, Peer
from tests.compat.peers import ROOT
from tests.compat.run import SETUPS, Cells, Found, columns, rows

BEGIN = "<!-- what follows is written by `make compat` -->"
END = "<!-- end of what is written by `make compat` -->"
_PLACE = re.compile(r"\{(url|at|bootstrap|events)(\d)\}")
_ADDRESSES = {"url": "http://127.0.0.1:{}", "at": "127.0.0.1:{}", "bootstrap": "{}", "events": "tcp://127.0.0.1:{}"}
_FIRST_PORTS = {"url": 8201, "at": 8201, "bootstrap": 8998, "events": 5557}


def path(peer: Peer) -> Path:
    return ROOT / "docs" / "compat" / f"{peer.name}.md"


def generated(peer: Peer, found: Found) -> str:
    parts = [f"Version {found.version}.", *(_started(peer, mode) for mode in peer.modes)]
    if peer.modes:
        head = ["", *columns(peer)]
        body = ([row, *(found.cells[row, name] for name in columns(peer))] for row in rows(peer))
        parts += ["### Every mode", _table(head, body)]
    if peer.setups:
        body = ([setup.row, found.cells[setup.row, SETUPS]] for setup in peer.setups)
        parts += ["### Set up for one thing", _table(["", "result"], body)]
    return "\n\n".join(parts)


def _table(head: list[str], body: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _started(peer: Peer, mode: Mode) -> str:
    """The commands of a mode, with ports that are easy to read."""
    lines = [f"**{mode.name}**" + (f": not run. {mode.not_run}" if mode.not_run else ""), ""]
    for number, role in enumerate(mode.roles):
        grpc = [] if not mode.grpc else ["--grpc-port", str(9201 + number)]
        flags = mode.shown_flags(role, 8201 + number, 8998 + number, 5557 + number)
        lines.append(f"    windtunnel serve wt-model {' '.join([*flags, *grpc])}")
    set_to = "".join(f"{name}={value} " for name, value in mode.environment.items())
    lines.append(f"    {set_to}{peer.program} {_shown(mode, mode.words)}")
    lines += (
        ["", "with `config.yaml`", "", *(f"    {line}" for line in _shown(mode, mode.config).splitlines())]
        if mode.config
        else []
    )
    return "\n".join(lines)


def _shown(mode: Mode, text: str) -> str:
    def one(place: re.Match[str]) -> str:
        kind, number = place[1], int(place[2])
        if kind == "url" and mode.grpc:
            return f"grpc://127.0.0.1:{9201 + number}"
        return _ADDRESSES[kind].format(_FIRST_PORTS[kind] + number)

    return _PLACE.sub(one, text).format(port=8300, metrics_port=8301, config="config.yaml", tokenizer="TOKENIZER", folder="OUT")


def committed(peer: Peer) -> str:
    """What stands between the marks, or nothing."""
    text = path(peer).read_text() if path(peer).is_file() else ""
    _, begin, rest = text.partition(BEGIN)
    return rest.partition(END)[0].strip() if begin else ""


def cells(peer: Peer) -> Cells:
    """The cells of the committed page."""
    found: Cells = {}
    names: list[str] = []
    for line in committed(peer).splitlines():
        row = [part.strip() for part in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if row and row[1] == "---":
            continue
        if not row:
            names = []
        elif not names:
            names = [SETUPS if name == "result" else name for name in row[1:]]
        else:
            found |= {(row[0], name): cell for name, cell in zip(names, row[1:], strict=True)}
    return found


def write(peer: Peer, text: str) -> None:
    file = path(peer)
    old = file.read_text() if file.is_file() else f"# {peer.name}\n\n{BEGIN}\n{END}\n"
    head, _, rest = old.partition(BEGIN)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def differences(peer: Peer, text: str) -> list[str]:
    """Lines that a run gives and the page does not have, and the other way round."""
    before, now = committed(peer).splitlines(), text.splitlines()
    gone = [f"- {line}" for line in before if line not in now]
    return gone + [f"+ {line}" for line in now if line not in before]
