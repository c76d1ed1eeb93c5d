"""`make conformance`: replay the recorded cases against the simulator and print what matches.

The last line is `N of M cases match`. A case that cannot be run counts as not matching; none is skipped.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import cases, responses, servers
from tests.conformance.replay import replay
from windtunnel.serve.tokenizers import load_tokenizer

SHOWN_LINES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = cases.golden_folder()
    if folder is None:
        print("no recordings: set WINDTUNNEL_GOLDEN to the folder that holds vllm/cases", file=sys.stderr)
        return 2
    everything = cases.load(folder)
    wanted = [case for case in everything if _is_wanted(case, options)]
    results = {case.title: ["no server is configured for this group"] for case in wanted}
    for server in servers.SERVERS:
        results |= _run(server, [case for case in wanted if case.group in server.groups], folder)
    _report(wanted, results, verbose=options.verbose)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--group", action="append", default=[], help="only this group (may be given several times)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="show the differences of every case that does not match")
    return parser.parse_args(arguments)


def _is_wanted(case: cases.Case, options: argparse.Namespace) -> bool:
    in_group = not options.group or case.group in options.group
    return in_group and (not options.case or any(part in case.title for part in options.case))


def _run(server: servers.Recorded, wanted: list[cases.Case], folder: Path) -> dict[str, list[str]]:
    """All cases of one server, in the order in which they were recorded."""
    if not wanted:
        return {}
    ordered = sorted(wanted, key=lambda case: case.seq)
    lines = responses.lines(ordered, load_tokenizer(folder))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        with servers.running(server, folder, text) as port:
            ids: dict[str, str] = {}
            return {case.title: replay(case, port, ids) for case in ordered}
    except RuntimeError as error:
        return {case.title: [str(error)] for case in ordered}


def _report(wanted: Sequence[cases.Case], results: dict[str, list[str]], *, verbose: bool) -> None:
    matching: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for case in wanted:
        lines = results[case.title]
        totals[case.group] += 1
        matching[case.group] += not lines
        if lines:
            _show(case, lines, verbose=verbose)
    print(f"\n{'group':<14} {'match':>6} {'of':>5} {'share':>7}")
    for group in totals:
        print(f"{group:<14} {matching[group]:>6} {totals[group]:>5} {matching[group] / totals[group]:>7.1%}")
    print(f"{matching.total()} of {totals.total()} cases match")


def _show(case: cases.Case, lines: list[str], *, verbose: bool) -> None:
    print(f"{case.title}: {lines[0][:200]}")
    for line in lines[1:SHOWN_LINES] if verbose else ():
        print(f"    {line[:1000]}")


if __name__ == "__main__":
    sys.exit(main())
