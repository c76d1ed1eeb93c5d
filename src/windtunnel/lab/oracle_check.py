"""Is this the answer that the prompt's identity calls for, and if not, whose is it?"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from windtunnel.core import oracle
from windtunnel.lab.dialects import DIALECTS
from windtunnel.lab.record import Ask, Damage, End, StreamRecord, TextFault

_PROBE_WORDS = 4


class Known:
    """All requests of a storm by tag. Owns the index from runs of words to tags, built when the first fault is looked up."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._lengths = {ask.tag: ask.max_tokens for ask in asks}
        self._index: dict[tuple[str, ...], tuple[int, int]] | None = None

    def owner(self, words: Sequence[str]) -> tuple[int, int] | None:
        """Tag and position of the request that these words belong to. Fewer than three words name nobody."""
        probe = tuple(words[:_PROBE_WORDS])
        if len(probe) < _PROBE_WORDS - 1:
            return None
        return self._built().get(probe)

    def _built(self) -> dict[tuple[str, ...], tuple[int, int]]:
        if self._index is None:
            self._index = dict(self._entries())
        return self._index

    def _entries(self) -> Iterable[tuple[tuple[str, ...], tuple[int, int]]]:
        for tag, length in self._lengths.items():
            words = oracle.words(identity(tag), 0, length)
            for size in (_PROBE_WORDS - 1, _PROBE_WORDS):
                for at in range(length - size + 1):
                    yield tuple(words[at : at + size]), (tag, at)


def identity(tag: int) -> int:
    return oracle.identity_of_tag(f"{tag:x}")


def check_text(tag: int, received: Sequence[str], known: Known, *, whole: int | None) -> TextFault | None:
    """The first fault of a text. `whole` is how many words a finished text must have; None: it may end anywhere.

    The last word of a text that may end anywhere may be the beginning of the right word (a tokenizer whose tokens are
    parts of words).
    """
    mine = identity(tag)
    at = oracle.first_difference(mine, received)
    if at is not None:
        want = oracle.words(mine, at, 1)[0]
        last = at == len(received) - 1
        if not (whole is None and last and want.startswith(received[at])):
            return _explain(tag, received, at, want, known)
    if whole is not None and len(received) != whole:
        return _length_fault(mine, received, whole)
    return None


def _explain(tag: int, received: Sequence[str], at: int, want: str, known: Known) -> TextFault:
    owner = known.owner(received[at:])
    if owner is None:
        return TextFault(Damage.WRONG, at, received[at], want)
    if owner[0] != tag:
        return TextFault(Damage.FOREIGN, at, received[at], want, owner[0])
    return TextFault(Damage.DUPLICATED if owner[1] < at else Damage.MISSING, at, received[at], want)


def _length_fault(mine: int, received: Sequence[str], whole: int) -> TextFault:
    if len(received) < whole:
        return TextFault(Damage.MISSING, len(received), "", oracle.words(mine, len(received), 1)[0])
    return TextFault(Damage.WRONG, whole, received[whole], "")


def judge(records: Iterable[StreamRecord], known: Known, *, exact_length: bool) -> list[StreamRecord]:
    """The records with their texts checked. `exact_length`: one token is one word here, so a finished text is whole."""
    out = []
    for record in records:
        all_asked_for = DIALECTS[record.ask.api].fixed_length or record.finish_reason == "max_tokens"
        whole = record.ask.max_tokens if record.end is End.FINISHED and exact_length and all_asked_for else None
        out.append(replace(record, fault=check_text(record.ask.tag, record.words, known, whole=whole)))
    return out
