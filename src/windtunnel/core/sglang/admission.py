"""What one prefill batch may take: budgets of memory, input and chunk (SGLang reference §9)."""

from enum import Enum

from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.memory import KvMemory
from windtunnel.core.sglang.sequence import SglangSequence

CLIP_MAX_NEW_TOKENS = 4096
"""The most output that admission expects of one request (SGLang 0.5.23, reference §9)."""


def expected_output(sequence: SglangSequence) -> int:
    return min(sequence.remaining, CLIP_MAX_NEW_TOKENS)


class Verdict(Enum):
    """Why admission goes on or ends."""

    GOES_ON = "goes on"
    NO_TOKEN = "no token"
    BUDGET = "budget"


class PrefillBudget:
    """Lives for one batch. Memory is taken as sequences are added; `reserved` is what running ones are expected to need."""

    def __init__(self, config: SglangEngineConfig, memory: KvMemory, reserved: float) -> None:
        self._memory = memory
        self._reserved = reserved
        self._input = config.max_prefill_tokens
        self._chunk = config.chunked_prefill_size if config.chunked_prefill_size > 0 else None
        self.taken: list[tuple[SglangSequence, int]] = []
        """Sequences and how many tokens of each are computed."""
        self.cached_tokens = 0

    @property
    def _tokens_left(self) -> float:
        return self._memory.available_tokens + self._memory.evictable_tokens - self._reserved

    def add_chunked(self, sequence: SglangSequence) -> bool:
        """Go on with a prompt that has been begun; as much as fits. True: it is complete with this."""
        free = self._memory.available_tokens + self._memory.evictable_tokens
        in_page = len(sequence.pages) * self._memory.page_size - sequence.computed
        rest = sequence.num_tokens - sequence.computed
        tokens = min(rest, free + in_page, rest if self._chunk is None else self._chunk)
        if tokens < rest:
            tokens = self._memory.tree.aligned(tokens)
        if tokens > 0:
            self._take(sequence, tokens)
        return tokens == rest

    def add(self, sequence: SglangSequence) -> tuple[Verdict, bool]:
        """Try to admit a waiting sequence. The flag tells whether it was taken; whole or cut is in `sequence.computed`."""
        if self._tokens_left <= 0:
            return Verdict.NO_TOKEN, False
        if self._input <= 0 or (self._chunk is not None and self._chunk <= 0):
            return Verdict.BUDGET, False
        cached = self._memory.attach(sequence)
        verdict, tokens = self._decide(sequence)
        if not tokens:
            self._memory.release(sequence)
            return verdict, False
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = True, cached
        self.cached_tokens += cached
        whole = tokens == sequence.num_tokens - cached
        self._take(sequence, tokens)
        self._reserved += expected_output(sequence) if whole else 0
        return (Verdict.GOES_ON if whole else Verdict.BUDGET), True

    def _decide(self, sequence: SglangSequence) -> tuple[Verdict, int]:
        """How many tokens of an attached sequence this batch computes; 0 with the reason why none."""
        rest = sequence.num_tokens - sequence.computed
        if self._memory.whole(rest) + expected_output(sequence) > self._tokens_left:
            return Verdict.NO_TOKEN, 0
        if rest >= self._input and self.taken:
            return Verdict.BUDGET, 0
        if self._chunk is None or rest <= self._chunk:
            return Verdict.GOES_ON, rest
        return Verdict.BUDGET, self._memory.tree.aligned(self._chunk)

    def _take(self, sequence: SglangSequence, tokens: int) -> None:
        grown = self._memory.grow(sequence, sequence.computed + tokens)
        assert grown, "admission took more than there is"
        sequence.computed += tokens
        self._input -= tokens
        if self._chunk is not None:
            self._chunk -= tokens
        self.taken.append((sequence, tokens))
