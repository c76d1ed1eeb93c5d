"""One forward pass between its start and its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from windtunnel.core.pacing import StepPlan
from windtunnel.core.sglang.sequence import SglangSequence


class Entry(NamedTuple):
    """One sequence's part in a batch. It is void once the sequence's epoch has moved on."""

    sequence: SglangSequence
    epoch: int
    tokens: int
    upto: int
    """Tokens of the sequence whose KV is computed when the batch has ended."""
    last: bool
    """This pass yields a token."""

    @property
    def valid(self) -> bool:
        return self.epoch == self.sequence.epoch and not self.sequence.state.terminal


@dataclass(slots=True)
class Batch:
    """Made by the scheduler, ended by the loop."""

    prefill: bool
    start_ns: int
    end_ns: int
    entries: list[Entry] = field(default_factory=list)
    """Of a prefill batch."""
    decoding: list[SglangSequence] = field(default_factory=list)
    """Of a decode batch: one token each, unless its epoch is no longer the one in `epochs`."""
    epochs: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    running_before: int = 0
    """Running sequences besides those that this batch prefills."""

    queue_gauges: Mapping[str, float] | None = None
    """Of a prefill batch: the queues as it was planned."""

    @property
    def new_tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    @property
    def plan(self) -> StepPlan:
        context = sum(entry.upto for entry in self.entries) + sum(sequence.computed for sequence in self.decoding)
        return StepPlan(self.new_tokens, len(self.decoding), context)

    def prefills(self, sequence: SglangSequence) -> bool:
        return any(entry.sequence is sequence for entry in self.entries)
