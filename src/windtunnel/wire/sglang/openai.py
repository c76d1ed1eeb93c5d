"""What SGLang's OpenAI families share: request fields, chunk heads, usage, abort events (SGLang reference §7.4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import TokenLogprob, WireError
from windtunnel.wire.sglang import errors, requests
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.vllm import chunks, fields

DONE = chunks.DONE


class OpenAiRequest(requests.RoutingFields):
    """Fields that completions and chat have in common."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    response_format: fields.AnyResponseFormat | None = None

    def sampling_values(self, max_tokens: int | None) -> Mapping[str, Any]:
        """Under the names that `requests.check_ranges` knows."""
        told = {name: getattr(self, name) for name in requests.SAMPLING_FIELDS}
        return told | {"n": self.n, "max_new_tokens": max_tokens, "min_new_tokens": self.min_tokens}


def wants_usage(options: fields.StreamOptions | None) -> tuple[bool, bool]:
    """(a usage event at the end, usage on every event)"""
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def chunk_head(response_id: str, kind: str, created: int, model: str) -> bytes:
    return b"data: %b," % http.dumps(body_head(response_id, kind, created, model))[:-1]


def body_head(response_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": created, "model": model}


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


def abort_events(error: WireError) -> bytes:
    return errors.stream_event(error)


def legacy_logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    return chunks.legacy_logprobs(entries, offset, as_ids=False)
