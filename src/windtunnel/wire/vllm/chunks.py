"""Pieces that completions and chat bodies share: usage objects, logprob lists, prompt logprobs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.core.tokenizer import Tokenizer
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, TokenLogprob, Usage
from windtunnel.wire.http import dumps
from windtunnel.wire.output import synthetic_logprobs

DONE = b"data: [DONE]\n\n"
LOGPROB_FLOOR = -9999.0


def frame(value: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % dumps(value)


def counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The three counts in the order in which the real server writes them."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def beams(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> tuple[Sequence[ChoiceResult], Usage]:
    """A beam that ended by itself names the end token as its stop reason; only `include_stop_str_in_output` leaves it among its
    tokens (vLLM 0.33, `BeamSearchOnlineMixin`)."""
    if not generation.extra.get("beam"):
        return choices, usage
    ended = [choice.finish_reason == "stop" and choice.stop_reason is None for choice in choices]
    eos = generation.spec.env.tokenizer.eos_token_id
    cut = 0 if generation.sampling.include_stop_str else 1
    shown = [
        replace(choice, stop_reason=eos, token_ids=choice.token_ids[: len(choice.token_ids) - cut]) if by_itself else choice
        for choice, by_itself in zip(choices, ended, strict=True)
    ]
    return shown, replace(usage, completion_tokens=usage.completion_tokens - cut * sum(ended))


def body_usage(usage: Usage, details: Mapping[str, Any] | None, completion_details: Mapping[str, Any] | None) -> dict[str, Any]:
    """`usage` of a body: nulls included."""
    told = counts(usage.prompt_tokens, usage.completion_tokens)
    return told | {"prompt_tokens_details": details, "completion_tokens_details": completion_details}


def body_details(usage: Usage, env_details: bool, *, created: bool) -> dict[str, Any] | None:
    """`prompt_tokens_details` of a body: null unless the server was started with the details on."""
    if not env_details:
        return None
    created_tokens = usage.created_cache_tokens if created else None
    return {"cached_tokens": usage.cached_tokens, "created_cache_tokens": created_tokens, "multimodal_tokens": None}


def stream_usage(usage: Usage, env_details: bool, *, created: bool) -> dict[str, Any]:
    """`usage` of the last chunk: nulls left out."""
    told = counts(usage.prompt_tokens, usage.completion_tokens)
    if env_details:
        details = {"cached_tokens": usage.cached_tokens}
        if created and usage.created_cache_tokens is not None:
            details["created_cache_tokens"] = usage.created_cache_tokens
        told["prompt_tokens_details"] = details
    return told


def token_name(entry_id: int, text: str, as_ids: bool) -> str:
    return f"token_id:{entry_id}" if as_ids else text


def legacy_logprobs(entries: Sequence[TokenLogprob], offset: int, as_ids: bool) -> dict[str, Any]:
    """The completions form. An entry whose logprob is NaN is the first prompt token, which has none."""
    out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        name = _legacy_append(out, entry, as_ids)
        out["text_offset"].append(offset)
        offset += len(name)
    return out


def _legacy_append(out: dict[str, Any], entry: TokenLogprob, as_ids: bool) -> str:
    name = token_name(entry.token_id, entry.token, as_ids)
    first = entry.logprob != entry.logprob
    out["tokens"].append(name)
    out["token_logprobs"].append(None if first else max(entry.logprob, LOGPROB_FLOOR))
    out["top_logprobs"].append(None if first else _legacy_top(entry, name, as_ids))
    return name


def _legacy_top(entry: TokenLogprob, name: str, as_ids: bool) -> dict[str, float]:
    top = {name: max(entry.logprob, LOGPROB_FLOOR)}
    for token_id, text, logprob in entry.top:
        top.setdefault(token_name(token_id, text, as_ids), max(logprob, LOGPROB_FLOOR))
    return top


def prompt_entries(token_ids: Sequence[int], alternatives: int, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Logprobs of a prompt; the first token has none and is marked with NaN."""
    entries = [synthetic_logprobs(token, at, alternatives, tokenizer) for at, token in enumerate(token_ids)]
    return [entries[0]._replace(logprob=float("nan"), top=()), *entries[1:]] if entries else []


def prompt_logprobs(token_ids: Sequence[int], alternatives: int | None, env: ServerEnv) -> list[Any] | None:
    """`prompt_logprobs`: null for the first token, then a map from token id to logprob, rank and text."""
    if alternatives is None:
        return None
    wanted = env.vocabulary if alternatives == -1 else alternatives
    entries = prompt_entries(token_ids, wanted, env.tokenizer)
    return [None if at == 0 else _ranked(entry) for at, entry in enumerate(entries)]


def _ranked(entry: TokenLogprob) -> dict[str, Any]:
    rows = {entry.token_id: (entry.logprob, entry.token)}
    for token_id, text, logprob in entry.top:
        rows.setdefault(token_id, (logprob, text))
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}
        for rank, (token_id, (logprob, text)) in enumerate(rows.items(), start=1)
    }


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, as_ids: bool) -> dict[str, Any]:
    """The chat form: `content[{token, logprob, bytes, top_logprobs[]}]`."""
    return {"content": [_chat_entry(entry, top, as_ids) for entry in entries]}


def _chat_entry(entry: TokenLogprob, top: int, as_ids: bool) -> dict[str, Any]:
    name = token_name(entry.token_id, entry.token, as_ids)
    alternatives = [
        {"token": shown, "logprob": max(logprob, LOGPROB_FLOOR), "bytes": list(shown.encode("utf-8", "replace"))}
        for shown, logprob in ((token_name(at, text, as_ids), logprob) for at, text, logprob in entry.top[:top])
    ]
    told = {"token": name, "logprob": max(entry.logprob, LOGPROB_FLOOR), "bytes": list(entry.token.encode("utf-8", "replace"))}
    return told | {"top_logprobs": alternatives}


def body_metrics(usage: Usage, env: ServerEnv) -> dict[str, Any]:
    """The `metrics` member of a body: with `--enable-per-request-metrics`, or null where the release writes it anyway."""
    if env.enable_per_request_metrics:
        return {"metrics": None if usage.metrics is None else dict(usage.metrics)}
    return {"metrics": None} if env.profile.metrics_when_off else {}


def weight_versions(env: ServerEnv) -> dict[str, Any]:
    return {"weight_versions": None} if env.profile.weight_versions else {}
