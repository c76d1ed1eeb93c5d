"""`make compat`: put each real peer before simulated workers, try a table of cases, and compare with docs/compat.

Exit codes: 0 every page is as the run, 1 one differs, 2 a peer is not installed (0 with `--if-installed`).
`--write` makes the pages as the run.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence

from tests.compat import page, peers
from tests.compat.all import PEERS
from tests.compat.modes import NOT_HERE, Peer
from tests.compat.run import Found, run_peer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument(
        "--peer", action="append", choices=[peer.name for peer in PEERS], help="only this one (may be repeated)"
    )
    parser.add_argument("--write", action="store_true", help="write the pages instead of comparing")
    parser.add_argument("--if-installed", action="store_true", help="leave out, with a line, what is not installed")
    options = parser.parse_args(arguments)
    wanted = [peer for peer in PEERS if not options.peer or peer.name in options.peer]
    return max(_one(peer, write=options.write, absent=0 if options.if_installed else 2) for peer in wanted)


def _one(peer: Peer, *, write: bool, absent: int) -> int:
    program = peers.find(peer.program)
    if program is None:
        print(f"{peer.name}: not installed: {peers.hint(peer.program)}", file=sys.stderr)
        return absent
    found = asyncio.run(run_peer(peer, program, lambda line: print(line, file=sys.stderr, flush=True)))
    text = page.generated(peer, found)
    lines = page.differences(peer, text)
    if write:
        page.write(peer, text)
    _summary(peer, found, lines, written=write)
    return 1 if lines and not write else 0


def _summary(peer: Peer, found: Found, lines: Sequence[str], *, written: bool) -> None:
    told = Counter(
        "works" if cell in ("works", "freed") else cell if cell in (NOT_HERE, "not run") else "otherwise"
        for cell in found.cells.values()
    )
    counts = ", ".join(f"{told[name]} {name}" for name in ("works", "otherwise", "not run") if told[name])
    state = "as its page" if not lines else "page written" if written else f"{len(lines)} lines differ from {page.path(peer)}"
    print(f"{peer.name} {found.version}: {counts}; {state}")
    for line in lines:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
