"""From engine tokens to what one choice says: incremental text, stop strings, finish reasons, logprobs.

Rules, as vLLM's output processor and detokenizer have them (vLLM reference §2.4, §3.1):

* While a stop string is looked for, the last (longest stop string - 1) characters are held back; with
  `include_stop_str` nothing is held back.
* A sequence that the engine ended with `stop` does not show its last token (EOS or a stop token id), but counts it.
* A stop string is looked for only in text of tokens after `min_tokens` (SGLang: in all); the first one of the list
  that is found wins.
* A stop regex (SGLang) is looked for in the last characters, as many as it can match but at most `REGEX_WINDOW_CHARS`; what it
  matched is shown, and nothing is held back for it.
* Bytes of an unfinished character at the end of an answer are dropped.
* Every engine output that brings tokens is a delta, even when its text is still held back.
"""

from collections.abc import Sequence
from hashlib import blake2b

from windtunnel.core.tokenizer import Detokenizer, Tokenizer
from windtunnel.wire.family import ChoiceResult, Delta, SamplingPlan, TokenLogprob
from windtunnel.wire.synth.regex import compiled

REGEX_WINDOW_CHARS = 256
PROMPT_END = 7
"""Tokens of the prompt that a detokenizer is primed with."""
REPETITION_STOP_REASON = "repetition_detected"


def merge(first: Delta, second: Delta) -> Delta:
    """Two consecutive deltas of one choice as one: what a slow reader gets."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or ()) + (second.logprobs or ())
    return Delta(
        first.index,
        first.text + second.text,
        first.token_ids + second.token_ids,
        logprobs,
        second.finish_reason,
        second.stop_reason,
    )


class HeldLogprobs:
    """Logprobs on their way out: those of held back text make no frame of their own and leave with the next one."""

    __slots__ = ("_held",)

    def __init__(self, choices: int) -> None:
        self._held: list[tuple[TokenLogprob, ...]] = [()] * choices

    def hold(self, delta: Delta) -> None:
        self._held[delta.index] += delta.logprobs or ()

    def any(self, index: int) -> bool:
        return bool(self._held[index])

    def release(self, index: int) -> tuple[TokenLogprob, ...]:
        released, self._held[index] = self._held[index], ()
        return released


def find_stop(text: str, searched_from: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The first of `stops` that ends in `text` after position `searched_from`, and where it begins."""
    for stop in stops:
        at = text.find(stop, max(0, searched_from + 1 - len(stop)))
        if at >= 0:
            return stop, at
    return None


def synthetic_logprobs(token_id: int, position: int, alternatives: int, tokenizer: Tokenizer) -> TokenLogprob:
    """Made-up but plausible logprobs: a pure function of the token and its position.

    The sampled token is always the best one, so the list is sorted and finite whatever the temperature was.
    `alternatives` counts the sampled token, as `top_logprobs` does.
    """
    digest = blake2b(token_id.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little"), digest_size=8).digest()
    logprob = -(1 + digest[0]) / 128
    ids = _alternative_ids(token_id, int.from_bytes(digest[1:]), alternatives, tokenizer.vocab_size)
    top = tuple((other, decoded(tokenizer, other), logprob - rank * 0.75) for rank, other in enumerate(ids))
    return TokenLogprob(token_id, decoded(tokenizer, token_id), logprob, top)


def _alternative_ids(token_id: int, seed: int, count: int, vocab_size: int) -> list[int]:
    if count <= 0:
        return []
    others = min(count, vocab_size) - 1
    start = seed % vocab_size
    ids = [token_id]
    candidate = start
    while len(ids) <= others:
        if candidate != token_id:
            ids.append(candidate)
        candidate = (candidate + 1) % vocab_size
    return ids


def decoded(tokenizer: Tokenizer, token_id: int) -> str:
    """A single token as the logprob lists show it: special tokens by name, broken characters as U+FFFD."""
    text = tokenizer.plain_text[token_id] if token_id < tokenizer.vocab_size else None
    return tokenizer.decode((token_id,), skip_special_tokens=False) if text is None else text


class ChoiceState:
    """The output side of one choice. Mutable; owned by the driver of its request.

    `keep=False` (streams) forgets text that has been handed out, so memory does not grow with the answer.
    `completion_tokens` counts every token pushed, the stop token included.
    """

    __slots__ = (
        "_after",
        "_detokenizer",
        "_hold",
        "_interval",
        "_keep",
        "_kept_logprobs",
        "_kept_text",
        "_kept_tokens",
        "_look_back",
        "_pending",
        "_plain",
        "_plain_only",
        "_sampling",
        "_stops_after",
        "_tail",
        "_tail_sent",
        "_tokenizer",
        "completion_tokens",
        "finish_reason",
        "index",
        "prompt_index",
        "stop_reason",
        "stopped_by",
    )

    def __init__(
        self,
        index: int,
        prompt_index: int,
        sampling: SamplingPlan,
        tokenizer: Tokenizer,
        *,
        keep: bool = True,
        stream_interval: int = 1,
        after: Sequence[int] = (),
    ) -> None:
        """`after`: the tokens of the prompt, of which the last few decide how the first text begins."""
        self.index = index
        self.prompt_index = prompt_index
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped_by: str | None = None
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._plain = tokenizer.plain_text
        self._after = after[-PROMPT_END:]
        self._detokenizer: Detokenizer | None = None
        """None while every token so far stood for itself."""
        self._plain_only = not (sampling.stop or sampling.stop_regex) and sampling.logprobs is None and stream_interval == 1
        self._stops_after = 0 if sampling.early_stops else sampling.min_tokens
        self._hold = max((len(stop) for stop in sampling.stop), default=1) - 1
        self._look_back = max(self._hold, REGEX_WINDOW_CHARS if sampling.stop_regex else 0)
        self._interval = stream_interval
        self._pending: Delta | None = None
        self._tail = ""
        self._tail_sent = 0
        self._keep = keep
        self._kept_text: list[str] = []
        self._kept_tokens: list[int] = []
        self._kept_logprobs: list[TokenLogprob] = []

    def push(
        self, token_ids: tuple[int, ...], finish_reason: str | None = None, stop_reason: int | str | None = None
    ) -> Delta | None:
        """What the tokens of one engine output add; None: nothing to say yet.

        After a finish, or once `stopped_by` is set, nothing may be pushed any more.
        """
        if self._plain_only and finish_reason is None and len(token_ids) == 1 and self._detokenizer is None:
            text = self._plain[token_ids[0]]
            if text is not None:
                self.completion_tokens += 1
                if self._keep:
                    self._kept_text.append(text)
                    self._kept_tokens += token_ids
                return Delta(self.index, text, token_ids)
        if not token_ids and finish_reason is None:
            return None
        return self._throttle(self._record(self._slow_push(token_ids, finish_reason, stop_reason)))

    @property
    def plain(self) -> bool:
        """Every token so far stood for itself, and nobody asks for more than text: a caller may write tokens past this state.

        It then adds them to `completion_tokens`.
        """
        return self._plain_only and not self._keep and self._detokenizer is None and self.finish_reason is None

    def result(self) -> ChoiceResult:
        """The whole choice, for an answer that is not streamed. Needs `keep=True`."""
        wanted = self._sampling.logprobs is not None
        return ChoiceResult(
            self.index,
            self.prompt_index,
            "".join(self._kept_text),
            tuple(self._kept_tokens),
            self.finish_reason,
            self.stop_reason,
            tuple(self._kept_logprobs) if wanted else None,
        )

    def _slow_push(self, token_ids: tuple[int, ...], finish_reason: str | None, stop_reason: int | str | None) -> Delta:
        logprobs = self._logprobs(token_ids)
        shown = token_ids
        if finish_reason == "stop" and token_ids and not self._sampling.include_stop_str:
            shown = token_ids[:-1]
        searched_from = self._grow(shown)
        self.completion_tokens += len(token_ids) - len(shown)
        if finish_reason == "repetition":
            stop_reason = REPETITION_STOP_REASON
        found = self._find_stop(searched_from) or self._find_regex(searched_from)
        if found is not None:
            self.stopped_by, finish_reason, stop_reason = found, "stop", found
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return Delta(self.index, self._take(finish_reason is not None), token_ids, logprobs, finish_reason, stop_reason)

    def _grow(self, token_ids: tuple[int, ...]) -> int:
        """Append the text of `token_ids` to the tail; the position from which stop strings may end."""
        searched_from = len(self._tail)
        minimum = self._stops_after
        if minimum <= self.completion_tokens:
            self._tail += self._text_of(token_ids)
            self.completion_tokens += len(token_ids)
            return searched_from
        for token in token_ids:
            self._tail += self._text_of((token,))
            self.completion_tokens += 1
            if self.completion_tokens <= minimum:
                searched_from = len(self._tail)
        return searched_from

    def _text_of(self, token_ids: tuple[int, ...]) -> str:
        if self._detokenizer is None:
            plain = self._plain
            texts = [plain[token] for token in token_ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
            skips = self._sampling.skip_special_tokens
            self._detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skips, after=self._after)
        return self._detokenizer.push(token_ids)

    def _find_stop(self, searched_from: int) -> str | None:
        """The stop string that ends the choice; cuts the tail after or before it."""
        stops = self._sampling.stop
        if not stops or self.completion_tokens <= self._stops_after or len(self._tail) == searched_from:
            return None
        found = find_stop(self._tail, searched_from, stops)
        if found is None:
            return None
        stop, at = found
        self._tail = self._tail[: at + len(stop) if self._sampling.include_stop_str else at]
        return stop

    def _find_regex(self, searched_from: int) -> str | None:
        for pattern in self._sampling.stop_regex:
            regex = compiled(pattern)
            if regex.search(self._tail[max(0, searched_from + 1 - min(regex.longest_chars, REGEX_WINDOW_CHARS)) :]):
                return pattern
        return None

    def _take(self, finished: bool) -> str:
        """Text that may leave; keeps what a later stop string could still claim."""
        held = 0 if finished or self._sampling.include_stop_str else self._hold
        end = max(len(self._tail) - held, self._tail_sent)
        text = self._tail[self._tail_sent : end]
        cut = max(0, min(end, len(self._tail) - self._look_back))
        self._tail, self._tail_sent = self._tail[cut:], end - cut
        return text

    def _logprobs(self, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
        count = self._sampling.logprobs
        if count is None:
            return None
        wanted = self._tokenizer.vocab_size if count < 0 else count
        return tuple(
            synthetic_logprobs(token, self.completion_tokens + offset, wanted, self._tokenizer)
            for offset, token in enumerate(token_ids)
        )

    def _record(self, delta: Delta) -> Delta:
        if self._keep:
            self._kept_text.append(delta.text)
            self._kept_tokens += delta.token_ids
            self._kept_logprobs += delta.logprobs or ()
        return delta

    def _throttle(self, delta: Delta) -> Delta | None:
        """`stream_interval`: the first and the last output go out at once, between them every N tokens."""
        if self._interval == 1:
            return delta
        pending = delta if self._pending is None else merge(self._pending, delta)
        first = self.completion_tokens == len(pending.token_ids)
        if pending.finish_reason is None and not first and len(pending.token_ids) < self._interval:
            self._pending = pending
            return None
        self._pending = None
        return pending
