"""From a planned generation to engine requests, and back from their outputs to an answer.

A *job* is all the engine requests of one API call: prompts x `n`. The engine's ids follow vLLM (reference §2.1): prompt `i`
of a completion is `<response id>-<i>`, other families use the response id; each gets a random suffix so that two live
calls with one client id cannot collide; choice `j` of `n > 1` is `<j>_<parent>`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from windtunnel.core.outputs import FinishReason, Refusal, TokenOutput
from windtunnel.core.request import EngineRequest, TokenSource
from windtunnel.core.sources import OracleSource
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.serve.clock import now_ns
from windtunnel.serve.ranks import Ranks
from windtunnel.serve.streams import LANE_TEXT_MAX, Answer, Lane
from windtunnel.serve.telemetry import Metrics
from windtunnel.wire.family import Generation, WireError
from windtunnel.wire.http import json_text
from windtunnel.wire.output import ChoiceState

MakeSource = Callable[[Generation, int, int], TokenSource]


class ChoiceListener:
    """Feeds one engine request's outputs to its choice of the answer.

    Most outputs of most streams are one plain token: those take the lane, where a frame costs one list append. Whatever else
    happens goes through the choice and the encoder, and the lane is asked for anew.
    """

    __slots__ = (
        "_answer",
        "_choice",
        "_driver",
        "_lane",
        "_lane_tokens",
        "_metrics",
        "_texts",
        "external_id",
        "request_id",
        "siblings",
    )

    def __init__(
        self,
        request: EngineRequest,
        answer: Answer,
        choice: ChoiceState,
        driver: Ranks,
        metrics: Metrics,
        texts: "PlainTexts",
    ) -> None:
        self.request_id = request.request_id
        self.external_id = request.tags["external_id"]
        self._answer = answer
        self._choice = choice
        self._driver = driver
        self._metrics = metrics
        self._texts = texts
        self._lane: Lane | None = None
        self._lane_tokens = 0
        self.siblings: tuple[str, ...] = ()
        """All requests of the same answer, where there are several: they end with it when this one fails."""

    def on_output(self, output: TokenOutput) -> None:
        _id, token_ids, finish_reason, _stop, _cached, error, _kv = output
        lane = self._lane
        if lane is not None and finish_reason is None and error is None and len(token_ids) == 1:
            text = self._texts[token_ids[0]]
            if text and lane.push(text):
                self._lane_tokens += 1
                return
        self.settle()
        if self._answer.wants_metrics:
            self._answer.usage.metrics = self._metrics.request_metrics_ms(self.request_id)
        self._answer.on_output(self._choice, output)
        if error is not None and error.failed:
            self._metrics.on_finished(self.request_id, FinishReason.ERROR, now_ns())
            self._drop_siblings()
        elif finish_reason is not None:
            self._metrics.on_finished(self.request_id, finish_reason, now_ns())
        elif self._choice.stopped_by is not None:
            self._metrics.on_finished(self.request_id, FinishReason.STOP, now_ns())
            self._driver.abort([self.request_id])
        self._lane = self._answer.lane(self._choice)

    def _drop_siblings(self) -> None:
        """The answer has ended: whoever else writes to it would write into the next answer of the connection."""
        if self.siblings:
            self._metrics.on_dropped(self.siblings)
            self._driver.abort(self.siblings)

    def settle(self) -> None:
        """Take what went through the lane into the counts."""
        self._choice.completion_tokens += self._lane_tokens
        self._answer.usage.completion_tokens += self._lane_tokens
        self._lane_tokens = 0

    def fail(self, error: WireError) -> None:
        self._answer.fail(error)

    def broken(self) -> None:
        self._metrics.on_dropped([self.request_id])
        self._drop_siblings()
        self._answer.fail(WireError("Internal server error", 500, "InternalServerError"))

    def finish_aborted(self) -> None:
        """An operator's abort by id: the front end writes the last piece itself, and nothing is counted (§3.8)."""
        self.settle()
        self._answer.on_output(self._choice, TokenOutput(self.request_id, (), FinishReason.ABORT))


@dataclass(slots=True)
class Job:
    """One API call at work. Owned by its handler; `Jobs` keeps it only for aborts by id."""

    response_id: str
    listeners: Sequence[ChoiceListener]

    def settle(self) -> None:
        for listener in self.listeners:
            listener.settle()

    @property
    def request_ids(self) -> list[str]:
        return [listener.request_id for listener in self.listeners]


class PlainTexts(dict[int, bytes]):
    """Token id to its JSON text, for short tokens that stand for themselves; b"" for others. Filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._plain = tokenizer.plain_text

    def __missing__(self, token_id: int) -> bytes:
        text = self._plain[token_id] if token_id < len(self._plain) else None
        encoded = None if text is None else json_text(text)
        if encoded is None or len(encoded) > LANE_TEXT_MAX:
            encoded = b""
        self[token_id] = encoded
        return encoded


class Jobs:
    """All jobs at work."""

    def __init__(
        self,
        driver: Ranks,
        metrics: Metrics,
        tokenizer: Tokenizer,
        make_source: MakeSource,
        new_suffix: Callable[[], str],
        limit: int,
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._make_source = make_source
        self._new_suffix = new_suffix
        self._limit = limit
        self._texts = PlainTexts(tokenizer)
        self._live: dict[int, Job] = {}
        self._idle = asyncio.Event()
        self.draining = False
        """Nothing new is computed: completions get `abort` and no text, other families a 500 (§3.9)."""

    def __len__(self) -> int:
        return len(self._live)

    def start(self, generation: Generation, answer: Answer, choices: Sequence[ChoiceState], arrival_ns: int) -> Job | Refusal:
        """Submit everything or nothing."""
        if len(self._live) >= self._limit:
            return Refusal("open_answers", f"The server already has {self._limit} open answers.")
        if self.draining and generation.family != "completions":
            return Refusal("draining", "cannot schedule new futures after shutdown", 500, "InternalServerError")
        if self.draining:
            for choice in choices:
                answer.on_output(choice, TokenOutput(generation.response_id, (), FinishReason.ABORT))
            return Job(generation.response_id, ())
        requests = list(self._requests(generation, arrival_ns))
        listeners = [
            ChoiceListener(request, answer, choice, self._driver, self._metrics, self._texts)
            for request, choice in zip(requests, choices, strict=True)
        ]
        refusal = self._submit(requests, listeners)
        if refusal is not None:
            self._metrics.on_rejected(refusal.reason)
            return refusal
        _introduce(listeners)
        job = Job(generation.response_id, listeners)
        self._live[id(job)] = job
        return job

    def _submit(self, requests: Sequence[EngineRequest], listeners: Sequence[ChoiceListener]) -> Refusal | None:
        """An id that is live can only come from a client that chooses its ids itself (SGLang's `rid`)."""
        try:
            return self._driver.submit(requests, listeners)
        except ValueError as error:
            return Refusal("invalid", str(error), 400, "BadRequestError")

    def end(self, job: Job) -> None:
        self._live.pop(id(job), None)
        if not self._live:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no job is at work."""
        while self._live:
            self._idle.clear()
            await self._idle.wait()

    def fail_all(self, error: WireError) -> None:
        """End every answer with `error`."""
        for job in list(self._live.values()):
            self.drop(job.request_ids)
            for listener in job.listeners:
                listener.fail(error)

    def abort_by_id(self, external_ids: Iterable[str]) -> None:
        """An operator's abort: matching streams get a last piece with `abort`. Unknown ids are ignored."""
        wanted = set(external_ids)
        hit = [listener for job in self._live.values() for listener in job.listeners if listener.external_id in wanted]
        self._finish_aborted(hit)

    def abort_all(self) -> int:
        """Abort every job; the number of engine requests that were live."""
        hit = [listener for job in self._live.values() for listener in job.listeners]
        self._finish_aborted(hit)
        return len(hit)

    def drop(self, request_ids: Sequence[str]) -> None:
        """End these engine requests without a word to anybody."""
        self._metrics.on_dropped(request_ids)
        self._driver.abort(request_ids)

    def _finish_aborted(self, listeners: Sequence[ChoiceListener]) -> None:
        self.drop([listener.request_id for listener in listeners])
        for listener in listeners:
            listener.finish_aborted()

    def _requests(self, generation: Generation, arrival_ns: int) -> Iterable[EngineRequest]:
        sampling = generation.sampling
        for prompt_index, prompt in enumerate(generation.prompts):
            external, parent, names = self._ids(generation, prompt_index)
            for child, request_id in enumerate(names):
                source = self._make_source(generation, prompt_index, child)
                yield EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt.token_ids,
                    source=source,
                    max_tokens=sampling.max_tokens,
                    arrival_ns=arrival_ns,
                    min_tokens=sampling.min_tokens,
                    ignore_eos=sampling.ignore_eos,
                    stop_token_ids=frozenset(sampling.stop_token_ids),
                    repetition=sampling.repetition,
                    priority=generation.priority,
                    lora=generation.lora,
                    cache_salt=generation.cache_salt,
                    media=prompt.media,
                    parent_id=parent if sampling.n > 1 else None,
                    data_parallel_rank=generation.data_parallel_rank,
                    session_id=generation.session_id,
                    prompt_hashes=prompt.block_hashes,
                    prompt_blocks=prompt.blocks,
                    report_cached_blocks=_reports_cached_blocks(generation),
                    kv_transfer=generation.kv_transfer,
                    bootstrap=generation.bootstrap[prompt_index * sampling.n + child] if generation.bootstrap else None,
                    extra_key=generation.extra_key,
                    routing_key=generation.routing_key,
                    tags=_tags(generation, external, source),
                )

    def _ids(self, generation: Generation, prompt_index: int) -> tuple[str, str, list[str]]:
        """(what an operator calls the prompt, the prompt's id, the ids of its choices)."""
        n = generation.sampling.n
        if generation.engine_ids is not None:
            given = generation.engine_ids[prompt_index]
            return given, given, [given] if n == 1 else [f"{given}_{child}" for child in range(n)]
        external = f"{generation.response_id}-{prompt_index}" if generation.indexed_ids else generation.response_id
        parent = f"{external}-{self._new_suffix()}"
        return external, parent, [parent] if n == 1 else [f"{child}_{parent}" for child in range(n)]


def _introduce(listeners: Sequence[ChoiceListener]) -> None:
    """Tell the requests of one answer of one another."""
    family = tuple([listener.request_id for listener in listeners])
    for listener in listeners if len(family) > 1 else ():
        listener.siblings = family


def _tags(generation: Generation, external: str, source: TokenSource) -> dict[str, str]:
    """What operators and metrics see of a request. A grammar shows as the answer that it asks for.

    The oracle's identity tells whose request it is where a router has given it another id.
    """
    tags = {"external_id": external, "family": generation.family, "stream": str(generation.stream).lower()}
    if isinstance(source, OracleSource):
        tags["identity"] = f"{source.identity:016x}"
    return tags if generation.answer_text is None else {**tags, "grammar": "true"}


def _reports_cached_blocks(generation: Generation) -> bool:
    """`vllm_xargs: {"kv_cache_report_mode": "full"}`: publish the blocks that the prompt finds in the cache, too (§6.2)."""
    xargs = generation.extra.get("vllm_xargs") or {}
    return bool(xargs.get("kv_cache_report_mode") == "full")
