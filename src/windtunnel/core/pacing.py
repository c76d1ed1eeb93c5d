"""How long things take: a choice behind one small interface.

*Step model* (`StepPacing`): the engine works in lock step, and one step costs a base plus so much per prefill token and
per running sequence. *Per-request model* (`RequestPacing`): each sequence has its own time to first token and
inter-token latencies, drawn from seeded distributions; zero means as fast as possible.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepPlan(NamedTuple):
    """What one step computes."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    """Tokens of KV that the step's attention reads."""


class Pacing(Protocol):
    def step_ns(self, plan: StepPlan) -> int:
        """How long this step occupies the engine."""
        ...

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int) -> int:
        """From scheduling to the first token of one sequence, at least."""
        ...

    def next_token_ns(self) -> int:
        """From one token of a sequence to its next, at least."""
        ...


@dataclass(frozen=True, slots=True)
class StepPacing:
    """step = base + prefill_token x tokens + decode_seq x sequences; all in nanoseconds."""

    base_ns: int
    prefill_token_ns: int
    decode_seq_ns: int

    def step_ns(self, plan: StepPlan) -> int:
        return self.base_ns + self.prefill_token_ns * plan.prefill_tokens + self.decode_seq_ns * plan.decode_seqs

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int) -> int:
        return 0

    def next_token_ns(self) -> int:
        return 0
