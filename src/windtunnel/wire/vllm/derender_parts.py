"""What both forms of derender read and know: choices of `/inference/v1/generate`, and how the engine would have ended them.

vLLM 0.33, `scale_out/derender` and `renderers/online_derenderer.py`. A token outside the vocabulary is a 400 of ours.
"""

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, SamplingPlan, TokenLogprob, WireError
from windtunnel.wire.output import decoded
from windtunnel.wire.vllm import chat, completions, fields
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.fields import TokenId

Ids = list[TokenId]


def _is_a_logprob(value: float) -> float:
    """Minus infinity is written as the floor; JSON has no word for the others."""
    if math.isnan(value) or value == math.inf:
        raise ValueError(f"logprob is {value}: must be a number or minus infinity")
    return value


Logprob = Annotated[float, AfterValidator(_is_a_logprob)]


class Candidate(fields.OpenModel):
    token_id: TokenId
    logprob: Logprob


class Entry(Candidate):
    top_logprobs: list[Candidate] = Field(default_factory=list)


class Logprobs(fields.OpenModel):
    content: list[Entry] | None = None


class Part(fields.OpenModel):
    """A choice, or what one chunk adds to it."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Ids | None = None
    logprobs: Logprobs | None = None


def ids_of(part: Part) -> Ids:
    """Every token that is to become text."""
    entries = (part.logprobs and part.logprobs.content) or ()
    candidates = [one.token_id for entry in entries for one in (entry, *entry.top_logprobs)]
    return [*(part.token_ids or ()), *candidates]


def ended_by_token(part: Part, sampling: SamplingPlan, env: ServerEnv) -> bool:
    """Its last token is the one that ended it."""
    if part.finish_reason != "stop" or isinstance(part.stop_reason, str) or not part.token_ids:
        return False
    last = part.token_ids[-1]
    if part.stop_reason is not None:
        return last == part.stop_reason
    eos = () if sampling.ignore_eos else (env.tokenizer.eos_token_id, *env.extra_eos_token_ids)
    return last in eos or last in sampling.stop_token_ids


def stop_reason_of(part: Part, sampling: SamplingPlan, env: ServerEnv) -> int | str | None:
    """What was told; else the token that ended it, unless that is EOS itself."""
    if part.stop_reason is not None or not ended_by_token(part, sampling, env):
        return part.stop_reason
    last = (part.token_ids or [])[-1]
    return None if last == env.tokenizer.eos_token_id else last


def logprob_entries(part: Part, keep: int | None, env: ServerEnv) -> tuple[TokenLogprob, ...] | None:
    """With their texts; at most `keep` candidates each."""
    entries = part.logprobs.content if part.logprobs is not None else None
    return None if entries is None else tuple(_entry(one, keep, env) for one in entries)


def _entry(given: Entry, keep: int | None, env: ServerEnv) -> TokenLogprob:
    kept = given.top_logprobs if keep is None else given.top_logprobs[:keep]
    top = tuple((one.token_id, decoded(env.tokenizer, one.token_id), one.logprob) for one in kept)
    return TokenLogprob(given.token_id, decoded(env.tokenizer, given.token_id), given.logprob, top)


def chat_candidates(request: ChatCompletionRequest | None) -> int | None:
    """Candidates of a token that chat shows; None: all, also if the request asks for none (`chat_top_logprobs_limit`)."""
    if request is None or not request.logprobs or request.logprob_token_ids or request.top_logprobs == -1:
        return None
    return request.top_logprobs or 0


def completion_candidates(request: completions.CompletionRequest | None) -> int | None:
    """The sampled one counts as well (`completion_top_logprobs_limit`)."""
    if request is None or request.logprobs is None or request.logprob_token_ids or request.logprobs == -1:
        return None
    return request.logprobs + 1


def chat_plan(request: ChatCompletionRequest | None, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """What a live server would have made of the request. Raises WireError."""
    if request is None:
        request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
    return chat.plan_request(request.model_copy(update={"model": None, "stream": False}), headers, env)


def completion_plan(request: completions.CompletionRequest | None, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    request = request or completions.CompletionRequest(prompt=" ")
    return completions.plan_request(request.model_copy(update={"model": None, "stream": False}), headers, env)


def check_parsers(request: ChatCompletionRequest | None, env: ServerEnv) -> bool:
    """Whether the server parses chat. Raises WireError if it does and there is no request to tell what it must look for."""
    parsed = env.reasoning_parser is not None or env.tool_call_parser is not None
    if parsed and request is None:
        raise WireError(
            "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak raw"
            " parser markup into content."
        )
    return parsed
