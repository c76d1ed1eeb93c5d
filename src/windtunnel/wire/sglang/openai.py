"""What SGLang's OpenAI families share: request fields, chunk heads, usage, abort events (SGLang reference §7.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, SamplingPlan, TokenLogprob, Usage
from windtunnel.wire.sglang import requests
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.sglang.native import result_ids, routed_values
from windtunnel.wire.vllm import chunks, fields

DONE = chunks.DONE
NO_OFFSET = -1


class OpenAiRequest(requests.SamplingFields, requests.RoutingFields):
    """Fields that completions and chat have in common."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    min_tokens: int = 0
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: fields.AnyResponseFormat | None = None

    def sampling_values(self, max_tokens: int | None) -> Mapping[str, Any]:
        """Under the names that `requests.check_ranges` knows."""
        told = {name: getattr(self, name) for name in requests.SAMPLING_FIELDS}
        return told | {"n": self.n, "max_new_tokens": max_tokens, "min_new_tokens": self.min_tokens}


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What an answer of either family is written from."""

    env: SglangEnv
    response_id: str
    model: str
    created: int
    prompts: tuple[PromptPlan, ...]
    n: int
    include_usage: bool
    """An event with no choices at the end of a stream."""
    continuous_usage: bool
    """Usage on every event."""

    @classmethod
    def of(
        cls, request: OpenAiRequest, routed: requests.Routing, prompts: tuple[PromptPlan, ...], env: SglangEnv, **own: Any
    ) -> Self:
        """`own`: the fields of a subclass."""
        options = request.stream_options
        return cls(
            env=env,
            response_id=result_ids(routed.rids, request.n or 1)[0],
            model=request.model or env.served_models[0],
            created=env.now_s(),
            prompts=prompts,
            n=request.n or 1,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            **own,
        )


def planned(
    family: str,
    request: OpenAiRequest,
    routed: requests.Routing,
    spec: AnswerSpec,
    sampling: SamplingPlan,
    answer_text: str | None,
) -> Generation:
    return Generation(
        spec=spec,
        response_id=spec.response_id,
        model=spec.model,
        prompts=spec.prompts,
        sampling=sampling,
        stream=bool(request.stream),
        family=family,
        engine_ids=routed.rids,
        answer_text=answer_text,
        stream_interval=spec.env.stream_interval,
        **routed_values(routed),
    )


def chunk_head(spec: AnswerSpec, kind: str) -> bytes:
    return b"data: %b," % http.dumps(_head(spec, kind))[:-1]


def _head(spec: AnswerSpec, kind: str) -> dict[str, Any]:
    return {"id": spec.response_id, "object": kind, "created": spec.created, "model": spec.model}


def answer_body(spec: AnswerSpec, kind: str, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    value = usage_value(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, spec.env)
    metadata = {"weight_version": spec.env.weight_version}
    return http.dumps(_head(spec, kind) | {"choices": choices, "usage": value, "metadata": metadata})


def usage_value(prompt_tokens: int, completion_tokens: int, cached: int, env: SglangEnv, reasoning: int = 0) -> dict[str, Any]:
    """Cached tokens only with `--enable-cache-report`."""
    details = {"cached_tokens": cached} if env.enable_cache_report else None
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
        "reasoning_tokens": reasoning,
    }


def stream_end(top: bytes, spec: AnswerSpec, usage: Usage | None) -> bytes:
    """Usage in an event with no choices, when it was asked for, and the terminator."""
    if not spec.include_usage:
        return DONE
    told = usage or Usage(sum(len(prompt.token_ids) for prompt in spec.prompts), 0)
    value = usage_value(told.prompt_tokens, told.completion_tokens, told.cached_tokens, spec.env)
    return b'%b"choices":[],"usage":%b}\n\n%b' % (top, http.dumps(value), DONE)


def finish_members(part: Delta | ChoiceResult) -> dict[str, Any]:
    """`finish_reason` and `matched_stop`; what an abort says is not a stop."""
    matched = part.stop_reason if part.finish_reason == "stop" else None
    return {"finish_reason": part.finish_reason, "matched_stop": matched}


def legacy_logprobs(entries: Sequence[TokenLogprob], alternatives: int) -> dict[str, Any]:
    """Offsets are not computed; without alternatives their list is empty (SGLang 0.5.23, `to_openai_style_logprobs`)."""
    told = chunks.legacy_logprobs(entries, 0, as_ids=False)
    return told | {"text_offset": [NO_OFFSET] * len(entries)} | ({} if alternatives else {"top_logprobs": []})
