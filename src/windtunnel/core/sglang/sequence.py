"""One sequence inside an SGLang engine."""

from windtunnel.core.lifecycle import State
from windtunnel.core.outputs import EngineError, FinishReason, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.hashing import namespace_of
from windtunnel.core.sglang.radix import RadixNode

WAITING_ABORT = EngineError("Abort in waiting queue", 200, "")
RUNNING_ABORT = EngineError("Aborted", 200, "")
"""Status 200: SGLang's abort object carries no status code (reference §5)."""
_AHEAD = 64


class SglangSequence:
    """Owned by the engine that made it. `pages[i]` holds tokens i x page_size …; the first `held` of them are the tree's."""

    __slots__ = (
        "abort",
        "admitted",
        "ahead",
        "arrived",
        "cached_tokens",
        "computed",
        "epoch",
        "held",
        "namespace",
        "node",
        "notify_abort",
        "output",
        "output_limit",
        "pages",
        "prompt_len",
        "queued_ns",
        "ready_at_ns",
        "request",
        "request_id",
        "retractions",
        "since_ns",
        "started_ns",
        "state",
        "stops",
        "tag",
    )

    def __init__(self, request: EngineRequest, config: SglangEngineConfig, arrived: int, now_ns: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tag = f"{request.request_id}#{arrived}"
        """Owner of its pages; unique even if the request id comes again."""
        self.prompt_len = len(request.prompt_token_ids)
        self.output_limit = max(1, min(request.max_tokens, config.max_request_tokens - self.prompt_len - 1))
        self.state = State.NEW
        self.since_ns = self.queued_ns = now_ns
        self.started_ns = 0
        self.arrived = arrived
        self.namespace = namespace_of(request)
        self.stops = request.stops(config.eos_token_id, config.extra_eos_token_ids)
        self.pages: list[int] = []
        self.held = 0
        self.node: RadixNode | None = None
        self.computed = 0
        """Tokens whose KV is in the pages once the batch under way has ended."""
        self.output: list[int] = []
        self.ahead: list[int] = []
        """The tokens that come next and end nothing, last one first; see `look_ahead`."""
        self.cached_tokens = 0
        self.admitted = False
        self.ready_at_ns = now_ns
        self.epoch = 0
        """Grows when it leaves a batch by force: results of earlier batches are void."""
        self.retractions = 0
        self.abort: EngineError | None = None
        """Requested, and due with the end of the next batch."""
        self.notify_abort = False

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output)

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.output_limit - len(self.output)

    def tokens(self, stop: int, start: int = 0) -> tuple[int, ...]:
        """Tokens start … stop - 1 of prompt and output together."""
        cut = self.prompt_len
        if stop <= cut:
            return self.request.prompt_token_ids[start:stop]
        return (*self.request.prompt_token_ids[start:], *self.output[max(0, start - cut) : stop - cut])

    def next_token(self, eos_token_id: int | None) -> TokenOutput:
        """Append the next token and test the stop conditions. The matched token is named, EOS too (reference §7.2)."""
        made = len(self.output)
        tokens = self.request.source.token_ids(made, 1)
        return self.accept(tokens[0] if tokens else eos_token_id, ended=not tokens)

    def look_ahead(self) -> None:
        """Fetch the tokens that come next, up to the first that might end the sequence: they need no test."""
        made = len(self.output)
        count = min(_AHEAD, self.output_limit - made - 1)
        if count < 1:
            return
        planned = list(self.request.source.token_ids(made, count))
        if not self.stops.isdisjoint(planned):
            del planned[next(at for at, token in enumerate(planned) if token in self.stops) :]
        planned.reverse()
        self.ahead = planned

    def accept(self, token: int | None, *, ended: bool) -> TokenOutput:
        """Append a given token (None: there is none) and test the stop conditions; `ended`: the text ends with it."""
        if token is None:
            return TokenOutput(self.request_id, (), FinishReason.STOP, None, self.cached_tokens)
        made = len(self.output)
        self.output.append(token)
        matched = ended or (token in self.stops and made >= self.request.min_tokens)
        if matched:
            return TokenOutput(self.request_id, (token,), FinishReason.STOP, token, self.cached_tokens)
        reason = FinishReason.LENGTH if made + 1 >= self.output_limit else None
        return TokenOutput(self.request_id, (token,), reason, None, self.cached_tokens)
