"""One step of the engine between its start and its end."""

from windtunnel.core.pacing import StepPlan
from windtunnel.core.vllm.sequence import VllmSequence


class Step:
    """Made by the scheduler, ended by the completion; owned by the engine in between."""

    __slots__ = (
        "budget",
        "context_tokens",
        "decoding",
        "disk_hits",
        "end_ns",
        "external_hits",
        "external_queries",
        "load_ns",
        "number",
        "preemptions",
        "prefilling",
        "prefix_hits",
        "prefix_queries",
        "start_ns",
    )

    def __init__(self, number: int, start_ns: int, budget: int) -> None:
        self.number = number
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.budget = budget
        self.decoding: list[VllmSequence] = []
        """One token each."""
        self.prefilling: list[tuple[VllmSequence, int]] = []
        """Sequences and how many prompt tokens of each are computed."""
        self.context_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_queries = 0
        """Prompt tokens not found in the pool, and so looked up in the host tier."""
        self.external_hits = 0
        self.disk_hits = 0
        self.load_ns = 0
        """What bringing blocks back from the tiers adds to the step."""

    @property
    def prefill_tokens(self) -> int:
        return sum(tokens for _sequence, tokens in self.prefilling)

    @property
    def decode_tokens(self) -> int:
        return len(self.decoding)

    @property
    def plan(self) -> StepPlan:
        return StepPlan(self.prefill_tokens, self.decode_tokens, self.context_tokens, self._prefill_pairs)

    @property
    def _prefill_pairs(self) -> int:
        return sum(tokens * (2 * sequence.computed + tokens + 1) // 2 for sequence, tokens in self.prefilling)

    @property
    def empty(self) -> bool:
        return not self.decoding and not self.prefilling

    def drop(self, sequence: VllmSequence) -> None:
        """Take back what was planned for a sequence that is preempted in the same step."""
        if sequence in self.decoding:
            self.decoding.remove(sequence)
            self.budget += 1
        for entry in self.prefilling:
            if entry[0] is sequence:
                self.prefilling.remove(entry)
                self.budget += entry[1]
                return
