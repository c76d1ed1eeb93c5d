"""The seam of an API family: how one kind of request is read and how its answer is written.

A family is one module: a request model, `plan`, a stream encoder, a body builder and an error envelope. Everything here is
plain values and pure functions. No signature names a connection, an HTTP request or a response: what a stream needs
is copied into its frozen spec before the first byte leaves (the ownership rule of `docs/design`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from windtunnel.core.request import Lora, MediaItem, Repetition


@dataclass(frozen=True, slots=True)
class WireError(Exception):
    """An error as the caller sees it, before its family has put it into an envelope."""

    message: str
    status: int = 400
    kind: str = "BadRequestError"
    """The `type` member. vLLM reference §2.6 lists both vocabularies."""
    param: str | None = None


class TokenLogprob(NamedTuple):
    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """Alternatives as (id, text, logprob), best first."""


class Delta(NamedTuple):
    """What one choice gained since its last frame. After a slow read several engine outputs come as one delta."""

    index: int  # type: ignore[assignment]  # the API's own name; nobody searches a delta with tuple.index
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """What matched; the message, if the engine has given one, where the finish reason is `abort`."""


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request (all prompts, all choices) so far. Owned, and counted up, by its answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    created_cache_tokens: int | None = None
    """Prompt tokens that this request wrote into the prefix cache: full blocks of the prompt less the cached ones."""
    metrics: Mapping[str, float | None] | None = None
    """Per-request timings in the order of vLLM reference §2.4, for `--enable-per-request-metrics` (n = 1 only)."""
    kv_transfer: Mapping[str, Any] | None = None
    """What the KV connector returned for the request: of several prompts the first, of `n` choices the one that ended last."""
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    def count_cached(self, tokens: int, prompt_index: int = 0) -> None:
        """Prompt tokens of one prompt that came from the prefix cache, and so were not written into it."""
        self.cached_tokens += tokens
        self.cached_by_prompt[prompt_index] = tokens
        if self.created_cache_tokens is not None:
            self.created_cache_tokens = max(0, self.created_cache_tokens - tokens)


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice of an answer that is not streamed."""

    index: int
    prompt_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None = None


class StreamEncoder(Protocol):
    """Writes the frames of one stream. Owns its spec and its own state, and nothing else.

    Calls come in the order `delta`* then one of `close` or `error`; nothing is called afterwards. Every call returns whole
    frames (each ends in a blank line and leaves as one HTTP chunk). `usage` has the counts so far; read it in the call only.
    """

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        """The frames for this delta (role chunks, text, the finishing chunk), or b""."""
        ...

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the JSON text of a plain delta of this choice, when that is all of its frame.

        None while a delta needs more (a role chunk, logprobs, a parser). Asked for after each call of `delta`.
        """
        ...

    def close(self, usage: Usage) -> bytes:
        """What ends a good stream: the usage chunk when asked for, then the family's terminator."""
        ...

    def error(self, error: WireError) -> bytes | None:
        """An error after the head, in this family's own form, with its terminator. None: the body is cut without one."""
        ...


@runtime_checkable
class OpeningEncoder(Protocol):
    """An encoder with frames that leave with the head, before any delta."""

    def opening(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt, tokenised. `text` is None when the client sent token ids."""

    token_ids: tuple[int, ...]
    text: str | None
    block_hashes: Sequence[bytes] = ()
    """Of its full KV blocks, made beforehand for a long prompt (`EngineRequest.prompt_hashes`)."""
    blocks: Sequence[int] = ()
    """`EngineRequest.prompt_blocks`."""
    media: tuple[MediaItem, ...] = ()
    identity: int | None = None
    """The oracle's identity of the prompt, made beforehand for a long one."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How each prompt is to be continued: values that engine and output processing need."""

    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    early_stops: bool = False
    """Stop strings count before `min_tokens`, too (SGLang)."""
    include_stop_str: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives per token; None: no logprobs."""
    prompt_logprobs: int | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition: Repetition | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that passed every check made before the head: all that is needed to run and answer it.

    `spec` is the family's own frozen value (ids, model name, created, options). `late_error` is a fault that the real server
    finds only at engine input: with `stream` it is an error frame under 200, otherwise a status (§2.8).
    """

    spec: Any
    response_id: str
    model: str
    prompts: tuple[PromptPlan, ...]
    sampling: SamplingPlan
    stream: bool
    family: str = ""
    """Shown in `/debug/requests`."""
    indexed_ids: bool = False
    """The engine's id of prompt `i` is `<response id>-<i>` (completions) and not the response id itself."""
    engine_ids: Sequence[str] | None = None
    """The engine's id of each prompt as it is, without a suffix (SGLang's rids); choice `j` of `n > 1` is `<id>_<j>`."""
    priority: int = 0
    lora: Lora | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    routing_key: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    stream_interval: int = 1
    late_error: WireError | None = None
    answer_text: str | None = None
    """What the answer must say (structured outputs, tool calls); None: the server's generation mode decides."""
    recorded: Sequence[Sequence[int] | None] | None = None
    """Recorded token ids of each choice (`wire.recorded`); None where nothing is recorded."""
    recorded_cached_tokens: int | None = None
    """What `usage` says of the prefix cache, when the recording fixes it."""
    kv_transfer: Mapping[str, Any] | None = None
    bootstrap: Sequence[tuple[str, int | None, int]] | None = None
    """(host, port, room) of each choice, prompt by prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Family(Protocol):
    """One API family, as `serve` uses it."""

    name: str
    paths: Sequence[str]

    def plan(self, body: bytes, headers: Mapping[str, str], env: Any) -> Generation:
        """Read, validate and tokenise. Raises WireError for everything found before the head."""
        ...

    def encoder(self, generation: Generation) -> StreamEncoder: ...

    def body(self, generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...

    def error_body(self, error: WireError) -> bytes:
        """The JSON of an error before the head, in this family's envelope."""
        ...
