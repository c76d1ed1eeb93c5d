"""Derender of a stream, one chunk a call: the client brings what the last call gave it back (vLLM 0.33, `DerenderStreamState`).

There is no stream and no session here. A body holds one event of `/inference/v1/generate` and the `stream_state` of the call
before; the answer is `{"chunk", "stream_state"}`. Two ways, as there:

* Text: the state is a window of the last tokens, as many as the next ones can need. Here they are ids, written as text.
* With a parser: the state is all tokens and where their chunks ended. They go through a fresh parser again, whose pieces of the
  last chunk are one delta.

Stop texts are refused: what was sent cannot be cut.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import SamplingPlan, WireError
from windtunnel.wire.output import PROMPT_END
from windtunnel.wire.vllm import chunks, completions, derender_parts, fields, models, parsers, prompts
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.chat_spec import ChatSpec, chat_finish
from windtunnel.wire.vllm.derender_parts import Ids, Part
from windtunnel.wire.vllm.fields import AtLeastOne, AtLeastZero

WINDOW_MAX = 1024
"""Tokens of a window that a client may send."""
_SEEDS, _PREFIX = PROMPT_END, 5
"""Tokens of the prompt's end that a stream begins with, and how many of them are its context (vLLM's `detokenizer_utils`)."""
_CONTEXT = 4
_COUNT_END = 1 << 63
"""Counts and offsets that a client tells are added to: without an end a sum has more digits than Python writes."""
Count = Annotated[int, Field(gt=-_COUNT_END, lt=_COUNT_END)]
_STOP_TEXTS = (
    "stop strings are not supported by streaming derender because text already sent cannot be cut. Use non-streaming derender "
    "or output_mode=text on /inference/v1/generate which holds stop strings back."
)
_NO_PROMPT = (
    "prompt_token_ids is required when a tool or reasoning parser is configured. Without it parse_delta cannot tell whether "
    "the prompt left reasoning open (e.g. a chat template that pre-opens <think>) and would misclassify reasoning content as "
    "plain content."
)


class State(fields.OpenModel):
    """`stream_state`."""

    prev_tokens: list[str] = Field(default_factory=list)
    prefix_offset: AtLeastZero = 0
    read_offset: AtLeastZero = 0
    role_sent: bool = False
    logprob_context_token_ids: Annotated[list[int], Field(max_length=_CONTEXT)] = Field(default_factory=list)
    logprob_text_offset: Annotated[AtLeastZero, Field(lt=_COUNT_END)] = 0
    output_token_ids: Ids = Field(default_factory=list)
    output_chunk_lens: list[AtLeastOne] = Field(default_factory=list)
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = Field(default_factory=list)

    @field_validator("prev_tokens")
    @classmethod
    def _bounded(cls, value: list[str]) -> list[str]:
        if len(value) > WINDOW_MAX:
            raise ValueError(f"prev_tokens length ({len(value)}) exceeds maximum ({WINDOW_MAX})")
        return value

    @model_validator(mode="after")
    def _sums(self) -> Self:
        total, held = sum(self.output_chunk_lens), len(self.output_token_ids)
        if total != held:
            raise ValueError(
                f"output_chunk_lens must sum to len(output_token_ids) (got sum={total}, len(output_token_ids)={held})"
            )
        return self


class Counts(fields.OpenModel):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0


class Chunk(fields.OpenModel):
    """One event of a stream of `/inference/v1/generate`."""

    request_id: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[Part]
    usage: Counts | None = None
    prompt_token_ids: Ids | None = None
    metrics: dict[str, Any] | None = None

    @field_validator("metrics")
    @classmethod
    def _writable(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """They are given back as they are."""
        json.dumps(value, allow_nan=False)
        return value


class _Asked(fields.OpenModel):
    stream: Literal[True]
    model: str | None = None
    generate_chunk: Chunk
    stream_state: State | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: Ids | None = None


class ChatChunkDerender(_Asked):
    chat_request: ChatCompletionRequest | None = None


class CompletionChunkDerender(_Asked):
    completion_request: completions.CompletionRequest | None = None


def chat_chunk(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """Both raise WireError."""
    asked = http.read_model(ChatChunkDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    request = asked.chat_request
    if request is not None and request.stop:
        raise WireError(_STOP_TEXTS)
    parsed = derender_parts.check_parsers(request, env)
    if parsed and asked.prompt_token_ids is None:
        raise WireError(_NO_PROMPT)
    if len(asked.generate_chunk.choices) > 1:
        raise WireError(f"derender_chat_stream expects at most one choice per chunk (got {len(asked.generate_chunk.choices)}).")
    _check_length(asked, env)
    _check_tokens(asked, env)
    planned = derender_parts.chat_plan(request, headers, env)
    write = _ChatWriter(planned.spec, planned.sampling, request, parsed, (asked.prompt_token_ids or [])[-_SEEDS:], env)
    state = State() if parsed and asked.stream_state is None else _begun(asked, _Window(env, write.skips))
    shown = []
    for part in asked.generate_chunk.choices:
        choice, state = write.choice(part, state)
        shown.append(choice)
    told = _head("chat.completion.chunk", asked, model, env)
    told |= {"choices": shown, "usage": _usage(asked), "system_fingerprint": None}
    told["prompt_token_ids"] = asked.generate_chunk.prompt_token_ids if request and request.return_token_ids else None
    told |= {"prompt_text": None, "metrics": asked.generate_chunk.metrics, "kv_transfer_params": None}
    return http.dumps({"chunk": told, "stream_state": _shown(state)})


def completion_chunk(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    asked = http.read_model(CompletionChunkDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    request = asked.completion_request
    if request is not None and request.stop:
        raise WireError(_STOP_TEXTS)
    if len(asked.prompt_token_ids or ()) > env.max_model_len:
        given = len(asked.prompt_token_ids or ())
        raise WireError(f"prompt_token_ids length ({given}) exceeds max_model_len ({env.max_model_len}).")
    if len(asked.generate_chunk.choices) > 1:
        raise WireError("derender_completion_stream expects at most one choice per chunk")
    _check_tokens(asked, env)
    sampling = derender_parts.completion_plan(request, headers, env).sampling
    window = _Window(env, sampling.skip_special_tokens)
    state = _begun(asked, window)
    shown = []
    for part in asked.generate_chunk.choices:
        choice, state = _completion_choice(part, state, window, sampling, asked)
        shown.append(choice)
    told = _head("text_completion", asked, model, env)
    told |= {"choices": shown, "usage": _usage(asked), "system_fingerprint": None}
    told |= {"metrics": asked.generate_chunk.metrics, "kv_transfer_params": None}
    return http.dumps({"chunk": told, "stream_state": _shown(state)})


def _check_length(asked: ChatChunkDerender, env: ServerEnv) -> None:
    """A parser's replay is bounded by the context."""
    prompt = len(asked.prompt_token_ids or ())
    before = len(asked.stream_state.output_token_ids) if asked.stream_state is not None else 0
    more = sum(len(part.token_ids or ()) for part in asked.generate_chunk.choices)
    if prompt + before + more > env.max_model_len:
        raise WireError(
            f"prompt_token_ids length ({prompt}) plus output_token_ids length ({before}) plus delta ({more}) exceeds "
            f"max_model_len ({env.max_model_len})."
        )


def _check_tokens(asked: _Asked, env: ServerEnv) -> None:
    for part in asked.generate_chunk.choices:
        prompts.check_vocabulary(derender_parts.ids_of(part), env)
    if asked.stream_state is not None:
        prompts.check_vocabulary(asked.stream_state.output_token_ids, env)


def _begun(asked: _Asked, window: "_Window") -> State:
    """The state that came along, or that of a stream which begins."""
    if asked.stream_state is not None:
        return asked.stream_state
    prompt = asked.generate_chunk.prompt_token_ids if asked.prompt_token_ids is None else asked.prompt_token_ids
    return window.seed(prompt or ())


def _head(kind: str, asked: _Asked, model: str, env: ServerEnv) -> dict[str, Any]:
    return {"id": asked.generate_chunk.request_id or env.new_id(), "object": kind, "created": env.now_s(), "model": model}


def _usage(asked: _Asked) -> dict[str, Any] | None:
    told = asked.generate_chunk.usage
    if told is None:
        return None
    prompt = told.prompt_tokens if asked.prompt_tokens is None else asked.prompt_tokens
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return chunks.counts(prompt, told.completion_tokens or 0) | details


def _shown(state: State) -> dict[str, Any]:
    return state.model_dump(include=set(State.model_fields))


def _context(state: State, part: Part) -> list[int]:
    return [*state.logprob_context_token_ids, *(part.token_ids or ())][-_CONTEXT:]


@dataclass(frozen=True, slots=True)
class _Window:
    """Incremental text over the tokens that a client carries."""

    env: ServerEnv
    skips: bool
    """Special tokens have no text."""

    def seed(self, prompt: Sequence[int]) -> State:
        ids = [token for token in prompt[-_SEEDS:] if not self._textless(token)]
        return State(prev_tokens=[str(token) for token in ids[-_PREFIX:]], read_offset=min(len(ids), _PREFIX))

    def push(self, token_ids: Sequence[int], state: State) -> tuple[str, State]:
        """The text that these tokens add. Raises the 400 for a state that no call has given."""
        window, read = self._read(state), state.read_offset - state.prefix_offset
        detokenizer = self.env.tokenizer.detokenizer(skip_special_tokens=self.skips)
        for token in window:
            detokenizer.push((token,))
        text = ""
        for token in token_ids:
            if self._textless(token):
                continue
            window.append(token)
            piece = detokenizer.push((token,))
            text += piece
            if piece:
                window, read = window[read:], len(window) - read
        update = {"prev_tokens": [str(token) for token in window], "prefix_offset": 0, "read_offset": read}
        return text, state.model_copy(update=update)

    def _read(self, state: State) -> list[int]:
        if not all(token.isascii() and token.isdigit() and len(token) < 20 for token in state.prev_tokens):
            raise WireError("invalid stream_state: prev_tokens is not what an earlier answer had")
        ids = [int(token) for token in state.prev_tokens][state.prefix_offset :]
        prompts.check_vocabulary(ids, self.env)
        if not state.prefix_offset <= state.read_offset <= len(state.prev_tokens):
            raise WireError("invalid stream_state: detokenization failed (read_offset is outside of prev_tokens)")
        return ids

    def _textless(self, token: int) -> bool:
        """A special token that is skipped: the window does not keep it."""
        if token >= self.env.tokenizer.vocab_size:
            return True
        plain = self.env.tokenizer.plain_text[token]
        return plain is None and not self.env.tokenizer.decode((token,), skip_special_tokens=self.skips)


def _completion_choice(
    part: Part, state: State, window: _Window, sampling: SamplingPlan, asked: CompletionChunkDerender
) -> tuple[dict[str, Any], State]:
    env, request = window.env, asked.completion_request
    text, after = window.push(_text_ids(part, sampling, env), state)
    entries = derender_parts.logprob_entries(part, derender_parts.completion_candidates(request), env)
    logprobs = None if entries is None else chunks.legacy_logprobs(entries, state.logprob_text_offset, as_ids=False)
    offset = state.logprob_text_offset + len(text)
    if logprobs is not None and logprobs["tokens"]:
        offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
    ids = bool(request is not None and request.return_token_ids)
    choice = {"index": part.index, "text": text, "logprobs": logprobs, "finish_reason": part.finish_reason}
    choice["stop_reason"] = derender_parts.stop_reason_of(part, sampling, env)
    choice["prompt_token_ids"] = asked.generate_chunk.prompt_token_ids if ids else None
    choice |= {"token_ids": part.token_ids if ids else None, "weight_versions": None}
    update = {"logprob_context_token_ids": _context(state, part), "logprob_text_offset": offset}
    return choice, after.model_copy(update=update)


def _text_ids(part: Part, sampling: SamplingPlan, env: ServerEnv) -> Ids:
    """Without the token that ended it, as the engine's detokenizer leaves it out."""
    ids = part.token_ids or []
    hidden = derender_parts.ended_by_token(part, sampling, env) and not sampling.include_stop_str
    return ids[:-1] if hidden else ids


@dataclass(frozen=True, slots=True)
class _ChatWriter:
    """The choice of one chat chunk."""

    spec: ChatSpec
    sampling: SamplingPlan
    request: ChatCompletionRequest | None
    parsed: bool
    prompt: Ids
    """Its end."""
    env: ServerEnv

    @property
    def skips(self) -> bool:
        """A parser must see its tags."""
        return self.sampling.skip_special_tokens and not self.parsed

    def choice(self, part: Part, state: State) -> tuple[dict[str, Any], State]:
        delta, after = self._parsed(part, state) if self.parsed else self._plain(part, state)
        hidden = self.parsed and not self.spec.include_reasoning
        shown = {"role": None if state.role_sent else "assistant", "content": None, "reasoning": None} | delta
        entries = None if hidden else derender_parts.logprob_entries(part, None, self.env)
        keep = derender_parts.chat_candidates(self.request)
        top = self.env.vocabulary if keep is None else keep
        finish = chat_finish(part.finish_reason, self.spec, after.tools_streamed)
        choice = {
            "index": part.index,
            "delta": shown,
            "logprobs": None if entries is None else chunks.chat_logprobs(entries, top, as_ids=False),
            "finish_reason": finish,
            "stop_reason": derender_parts.stop_reason_of(part, self.sampling, self.env),
            "token_ids": part.token_ids if self.spec.token_ids and not hidden else None,
            "weight_versions": None,
        }
        return choice, after.model_copy(update={"role_sent": True, "logprob_context_token_ids": _context(state, part)})

    def _plain(self, part: Part, state: State) -> tuple[dict[str, Any], State]:
        text, after = _Window(self.env, self.skips).push(_text_ids(part, self.sampling, self.env), state)
        return ({"content": text} if text else {}), after

    def _parsed(self, part: Part, state: State) -> tuple[dict[str, Any], State]:
        """What the parser makes of this chunk, after it has seen those before it again."""
        detokenizer = self.env.tokenizer.detokenizer(skip_special_tokens=False, after=self.prompt)
        parser = (
            parsers.make_parser(reasoning=self.spec.reasoning, tools=self.spec.tools is not None) or parsers.ContentParser()
        )
        start = 0
        for length in state.output_chunk_lens:
            parser.push(detokenizer.push(state.output_token_ids[start : start + length]))
            start += length
        pieces = parser.push(detokenizer.push(_text_ids(part, self.sampling, self.env)))
        if part.finish_reason is not None:
            pieces += parser.finish()
        names = list(state.last_tool_call_ids)
        delta = self._delta(pieces, names)
        ids = part.token_ids or []
        update = {
            "output_token_ids": [*state.output_token_ids, *ids],
            "output_chunk_lens": [*state.output_chunk_lens, *([len(ids)] if ids else ())],
            "tools_streamed": state.tools_streamed or "tool_calls" in delta,
            "last_tool_call_ids": names,
        }
        return delta, state.model_copy(update=update)

    def _delta(self, pieces: Sequence[parsers.Piece], names: list[str]) -> dict[str, Any]:
        """All pieces as one delta. `names` are the ids of the calls so far; new ones are added."""
        spec = self.spec
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind in ("content", "reasoning"):
                if piece.kind == "content" or spec.include_reasoning:
                    delta[piece.kind] = delta.get(piece.kind, "") + piece.text
            elif piece.call == 0 or spec.parallel_tool_calls:
                self._add_call(calls, piece, names)
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def _add_call(self, calls: dict[int, dict[str, Any]], piece: parsers.Piece, names: list[str]) -> None:
        function: dict[str, Any] = {"name": None, "arguments": None}
        call = calls.setdefault(piece.call, {"id": None, "type": None, "index": piece.call, "function": function})
        if piece.kind == "arguments":
            call["function"]["arguments"] = (call["function"]["arguments"] or "") + piece.text
            return
        if piece.call >= len(names):
            names.append(f"chatcmpl-tool-{self.env.new_id()}")
        call |= {"id": names[piece.call], "type": "function"}
        call["function"]["name"] = piece.text
