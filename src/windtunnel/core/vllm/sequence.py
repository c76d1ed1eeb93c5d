"""One sequence inside the vLLM engine.

Most tokens are dull: nothing stops there. `plan` finds how many dull tokens come next and prepares their outputs, so that a
step costs a dull sequence one `next(feed)`: `quiet` outputs lead to the end of the block under way, and `beyond` are planned
behind it. The last of a block (`block_end`) is not in the feed, because the block is published with it. Meanwhile `output`
and `computed_at_end` stand where they will be at the end of the plan; the properties give the present.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import length_hint

from windtunnel.core.kv.hashing import BlockHasher, ExtraKeys
from windtunnel.core.lifecycle import State
from windtunnel.core.outputs import FinishReason, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.vllm.config import VllmEngineConfig

_PLAN_TOKENS = 64
_NO_OUTPUTS: Iterator[TokenOutput] = iter(())
_NO_TOKENS: Iterator[tuple[int, ...]] = iter(())
_NO_IDS = repeat("", 0)
_NONE = repeat(None)
_new_output = partial(tuple.__new__, TokenOutput)


class VllmSequence:
    """Owned by the engine that made it; the scheduler moves it between queues."""

    __slots__ = (
        "abort_step",
        "_ahead",
        "_left",
        "admitted",
        "arrived",
        "beyond",
        "block_end",
        "blocks",
        "cached_tokens",
        "computed_at_end",
        "feed",
        "hashes",
        "keys",
        "notify_abort",
        "output",
        "output_limit",
        "prefilling",
        "prompt_len",
        "published",
        "ready_at_ns",
        "request",
        "request_id",
        "roomy",
        "run_order",
        "since_ns",
        "state",
        "stops",
    )

    def __init__(self, request: EngineRequest, config: VllmEngineConfig, arrived: int, now_ns: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_len = len(request.prompt_token_ids)
        self.state = State.NEW
        self.since_ns = now_ns
        self.arrived = arrived
        """Place in the engine's order of arrival; a preemption under fcfs makes it negative (in front of everybody)."""
        self.run_order = -1
        """Place in the running list; -1 outside."""
        self.ready_at_ns = now_ns
        self.blocks: list[int] = []
        self.hashes: list[bytes] = list(request.prompt_hashes)
        self.keys = ExtraKeys(request)
        self.published = 0
        """Blocks of this sequence that stand in the prefix cache."""
        self.output: list[int] = []
        self.computed_at_end = 0
        self.beyond = 0
        self.feed = _NO_OUTPUTS
        self.block_end = False
        """One more planned output follows the feed and ends a block or the plan."""
        self._left = _NO_IDS
        """As long as the rest of the feed, which it ends."""
        self._ahead = _NO_TOKENS
        self.roomy = False
        """Decodes, and its last block takes the next token: the scheduler need not look closer."""
        self.cached_tokens = 0
        self.admitted = False
        """Has been scheduled once; later admissions follow a preemption."""
        self.prefilling = True
        """Has no output token yet."""
        self.abort_step = -1
        """Under asynchronous scheduling: the step with whose end a requested abort takes effect."""
        self.notify_abort = False
        self.output_limit = min(request.max_tokens, max(1, config.max_model_len - self.prompt_len))
        self.stops = request.stops(config.eos_token_id, config.extra_eos_token_ids)

    @property
    def quiet(self) -> int:
        """Planned outputs up to the end of the block under way."""
        return length_hint(self._left) + self.block_end

    @property
    def computed(self) -> int:
        """Tokens whose KV is in the blocks."""
        return self.computed_at_end - self.quiet - self.beyond

    @property
    def output_tokens(self) -> int:
        return len(self.output) - self.quiet - self.beyond

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output) - self.quiet - self.beyond

    def token_slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens start … stop - 1 of prompt and output together."""
        cut = self.prompt_len
        if stop <= cut:
            return self.request.prompt_token_ids[start:stop]
        if start >= cut:
            return tuple(self.output[start - cut : stop - cut])
        return (*self.request.prompt_token_ids[start:], *self.output[: stop - cut])

    def block_hashes(self, hasher: BlockHasher, blocks: int) -> list[bytes]:
        """Hashes of at least the first `blocks` full blocks; each is computed once."""
        have = len(self.hashes)
        if have < blocks:
            size = hasher.block_size
            hasher.extend(self.hashes, self.token_slice(have * size, blocks * size), self.keys, blocks)
        return self.hashes

    def settle(self) -> None:
        """Give up the plan, so that the fields give the present too."""
        planned = self.quiet + self.beyond
        if planned:
            del self.output[-planned:]
            self.computed_at_end -= planned
            self._forget_plan()

    def _forget_plan(self) -> None:
        self.beyond = 0
        self.feed, self._ahead, self._left = _NO_OUTPUTS, _NO_TOKENS, _NO_IDS
        self.block_end = False

    def next_token(self, eos_token_id: int | None) -> TokenOutput:
        """Append the next token and test the stop conditions: EOS, stop token ids, length, repetition (reference §5.2)."""
        made = len(self.output)
        tokens = self.request.source.token_ids(made, 1)
        token, ended = (tokens[0], False) if tokens else (eos_token_id, True)
        if token is None:
            return TokenOutput(self.request_id, (), FinishReason.STOP, None, self.cached_tokens)
        self.output.append(token)
        reason, stop = self._stop(token, made + 1, eos_token_id, ended=ended)
        return TokenOutput(self.request_id, (token,), reason, stop, self.cached_tokens)

    def _stop(self, token: int, made: int, eos: int | None, *, ended: bool) -> tuple[FinishReason | None, int | None]:
        if ended:
            return FinishReason.STOP, None
        if token in self.stops and made >= self.request.min_tokens:
            return FinishReason.STOP, None if token == eos and not self.request.ignore_eos else token
        if made >= self.output_limit:
            return FinishReason.LENGTH, None
        repetition = self.request.repetition
        return (FinishReason.REPETITION if repetition is not None and repetition.ends(self.output) else None), None

    def next_block(self, block_size: int) -> None:
        """The block under way is full and computed: go on with the plan, or make one."""
        if self.beyond:
            self._prepare(min(self.beyond, block_size))
            self.roomy = False
        else:
            self.plan(block_size)

    def plan(self, block_size: int) -> None:
        """After a token that nothing was planned behind: prepare the dull ones that follow."""
        made = len(self.output)
        tokens = self.prompt_len + made
        self.roomy = len(self.blocks) * block_size >= tokens
        to_boundary = block_size - (tokens - 1) % block_size
        further_blocks = max(0, _PLAN_TOKENS - to_boundary) // block_size
        if made == 1:
            # Those that start together plan at different times from here on: no step pays for all.
            further_blocks = self.arrived % (further_blocks + 1)
        count = min(to_boundary + further_blocks * block_size, self.output_limit - made - 1)
        if count < 1 or self.request.repetition is not None:
            return
        planned = self.request.source.token_ids(made, count)
        if not self.stops.isdisjoint(planned):
            planned = planned[: next(at for at, token in enumerate(planned) if token in self.stops)]
        if planned:
            self._start_plan(planned, to_boundary)

    def _start_plan(self, planned: Sequence[int], to_boundary: int) -> None:
        count = len(planned)
        self.output += planned
        self.computed_at_end += count
        self._ahead = zip(planned)
        self.beyond = count
        self._prepare(min(count, to_boundary))

    def _prepare(self, count: int) -> None:
        self.beyond -= count
        self.block_end = True
        self._left = repeat(self.request_id, count - 1)
        fields = zip(self._left, self._ahead, _NONE, _NONE, repeat(self.cached_tokens), _NONE, _NONE)
        self.feed = map(_new_output, fields)

    def end_block(self) -> TokenOutput:
        """The output that `block_end` announces."""
        self.block_end = False
        return _new_output((self.request_id, next(self._ahead), None, None, self.cached_tokens, None, None))
