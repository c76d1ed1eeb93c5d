"""Draw the room table's status machine from its rules, as it stands in docs/pd.md.

Usage: PYTHONPATH=src draw_status.py
"""

from collections.abc import Iterator, Sequence

from windtunnel.core.transfer.status import RULES, KVPoll

DRAWN = ("nores", "terminal-failed")
_NAMES = {
    KVPoll.FAILED: "Failed",
    KVPoll.BOOTSTRAPPING: "Bootstrapping",
    KVPoll.WAITING_FOR_INPUT: "WaitingForInput",
    KVPoll.TRANSFERRING: "Transferring",
    KVPoll.SUCCESS: "Success",
}
_LETTERS = {
    "B": KVPoll.BOOTSTRAPPING,
    "W": KVPoll.WAITING_FOR_INPUT,
    "T": KVPoll.TRANSFERRING,
    "S": KVPoll.SUCCESS,
    "F": KVPoll.FAILED,
}
SEQUENCES = ("BWF", "BWFT", "BWFTS", "BWTFT", "BWSF", "WB", "T", "F", "W", "TB", "FB")
"""Writes in order, to a room that is not known at first (SGLang reference §1.3)."""


def transitions(rule: str) -> Iterator[tuple[str, str, str]]:
    """(from, to, what is written) for every write that changes the room; `[*]` is the unknown room."""
    for read in (None, *KVPoll):
        for new in KVPoll:
            stored = RULES[rule](read, new)
            if stored is not None and stored is not read:
                yield "[*]" if read is None else _NAMES[read], _NAMES[stored], _NAMES[new]


def mermaid(rule: str) -> str:
    lines = [f"    {before} --> {after}" for before, after, _ in transitions(rule)]
    return "\n".join(["```mermaid", "stateDiagram-v2", *dict.fromkeys(lines), "```"])


def outcome(rule: str, writes: Sequence[KVPoll]) -> str:
    """What a room reads after these writes: a letter, or absent."""
    value: KVPoll | None = None
    for new in writes:
        stored = RULES[rule](value, new)
        value = value if stored is None else stored
    return next((letter for letter, status in _LETTERS.items() if status is value), "absent")


def truth_table() -> str:
    rows = [f"| writes, in order | {' | '.join(f'`{rule}`' for rule in RULES)} |", "|---" * (len(RULES) + 1) + "|"]
    for letters in SEQUENCES:
        cells = [outcome(rule, [_LETTERS[letter] for letter in letters]) for rule in RULES]
        rows.append(f"| {', '.join(letters)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def drawing() -> str:
    """Both machines and the table, as the document has them."""
    return "\n\n".join([*(f"Rule `{rule}`:\n\n{mermaid(rule)}" for rule in DRAWN), truth_table()])


if __name__ == "__main__":
    print(drawing())
