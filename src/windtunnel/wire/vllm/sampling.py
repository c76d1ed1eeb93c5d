"""From request fields to a `SamplingPlan`: defaults, the range checks, the limits found at engine input.

Two stages, as in the real server (vLLM reference §2.8): `check_ranges` is made before the head of an answer,
`late_error` is what the engine's input stage finds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.core.request import Repetition
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import SamplingPlan, WireError
from windtunnel.wire.http import parameter_error
from windtunnel.wire.vllm.prompts import highest_token_id

GREEDY_BELOW = 1e-5
_NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling fields of one request after defaults, in either family."""

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    include_stop_str: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None
    beam: bool = False
    repetition: Repetition | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def from_request(
    request: Any, env: ServerEnv, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """The sampling fields of a completions or chat request model."""
    stop = request.stop
    return Sampling(
        max_tokens=max_tokens,
        n=1 if request.n is None else request.n,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        include_stop_str=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens is not False,
        thinking_token_budget=request.thinking_token_budget,
        beam=request.use_beam_search,
        repetition=_repetition(request),
        **{name: _defaulted(request, env, name) for name in _NEUTRAL},
    )


def _repetition(request: Any) -> Repetition | None:
    """`repetition_detection`; sizes of 0 switch it off. Raises the 400 for values that mean nothing."""
    asked = getattr(request, "repetition_detection", None)
    if asked is None or not asked.max_pattern_size:
        return None
    shortest = max(1, asked.min_pattern_size)
    if not 0 <= asked.min_pattern_size <= asked.max_pattern_size:
        raise WireError("repetition_detection needs 0 <= min_pattern_size <= max_pattern_size.")
    if asked.min_count < _LEAST_COPIES:
        raise WireError(f"repetition_detection: min_count must be at least {_LEAST_COPIES}, got {asked.min_count}.")
    return Repetition(shortest, asked.max_pattern_size, asked.min_count)


_LEAST_COPIES = 2


def _defaulted(request: Any, env: ServerEnv, name: str) -> Any:
    given = getattr(request, name)
    return env.default_sampling.get(name, _NEUTRAL[name]) if given is None else given


def plan(sampling: Sampling, env: ServerEnv) -> SamplingPlan:
    """What engine and output processing need."""
    extra_eos = () if sampling.ignore_eos else env.extra_eos_token_ids
    return SamplingPlan(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        n=sampling.n,
        stop=sampling.stop,
        stop_token_ids=(*sampling.stop_token_ids, *(token for token in extra_eos if token not in sampling.stop_token_ids)),
        include_stop_str=sampling.include_stop_str,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        seed=sampling.seed,
        temperature=sampling.temperature,
        repetition=sampling.repetition,
    )


def capped_max_tokens(requested: int | None, field: str, prompt_tokens: int, default: int | None, env: ServerEnv) -> int:
    """`max_tokens` reduced to what fits; a value over the context length itself is a 400."""
    if requested is not None and requested > env.max_model_len:
        told = f"{field}={requested} is more than max_model_len={env.max_model_len} allows; request fewer output tokens"
        raise parameter_error(told, field, requested)
    room = env.max_model_len - prompt_tokens
    limits = [room, requested if requested is not None else default, env.default_sampling.get("max_tokens")]
    return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One range check: when it fails, what it says, and whether the sentence names its parameter."""

    field: str
    ok: Callable[[Any], bool]
    must: str
    named: bool = False


_RULES: tuple[_Rule, ...] = (
    _Rule("n", lambda v: v >= 1, "must be at least 1"),
    _Rule("presence_penalty", lambda v: -2 <= v <= 2, "must be in [-2, 2]"),
    _Rule("frequency_penalty", lambda v: -2 <= v <= 2, "must be in [-2, 2]"),
    _Rule("repetition_penalty", lambda v: v > 0, "must be greater than zero"),
    _Rule("temperature", math.isfinite, "must be a finite number", named=True),
    _Rule("temperature", lambda v: v >= 0, "must be non-negative", named=True),
    _Rule("temperature", lambda v: v <= 2, "must be in [0, 2]", named=True),
    _Rule("top_p", lambda v: 0 < v <= 1, "must be in (0, 1]", named=True),
    _Rule("top_k", lambda v: v >= -1, "must be 0 or -1 (off), or at least 1"),
    _Rule("min_p", lambda v: 0 <= v <= 1, "must be in [0, 1]"),
    _Rule("max_tokens", lambda v: v >= 1, "must be at least 1", named=True),
    _Rule("min_tokens", lambda v: v >= 0, "must be greater than or equal to 0"),
)


def check_ranges(sampling: Sampling, env: ServerEnv) -> None:
    """Raises the 400 of the first value out of range, in the order in which the real server looks."""
    for rule in _RULES:
        value = getattr(sampling, rule.field)
        if rule.field == "max_tokens" and sampling.beam:
            continue
        if not rule.ok(value):
            message = f"{rule.field} {rule.must}, got {value}."
            raise parameter_error(message, rule.field, value) if rule.named else WireError(message)
    if sampling.n > env.max_n:
        raise WireError(f"n must be at most {env.max_n}, got {sampling.n}.")
    if sampling.min_tokens > sampling.max_tokens:
        raise WireError(f"min_tokens must be at most max_tokens={sampling.max_tokens}, got {sampling.min_tokens}.")
    if any(not stop for stop in sampling.stop):
        raise WireError("stop must not contain an empty string.")
    if sampling.n > 1 and sampling.greedy and not sampling.beam:
        raise WireError(f"n must be 1 with greedy sampling, got {sampling.n}.")


def check_logit_bias_keys(logit_bias: Mapping[str, float] | None) -> None:
    bad = [key for key in logit_bias or () if not _is_int(key)]
    if bad:
        raise parameter_error(f"logit_bias has key(s) that are not integer token ids: {bad}", "logit_bias", bad)


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def late_error(sampling: Sampling, prompts: Sequence[Sequence[int]], env: ServerEnv) -> WireError | None:
    """What only the engine's input stage finds: limits against the model, tokens outside the vocabulary."""
    checks = (_over_max_logprobs, _bias_outside, _ids_outside, _budget_without_reasoning)
    for check in checks:
        found = check(sampling, env)
        if found is not None:
            return found
    return _bad_prompt(prompts, env)


def _over_max_logprobs(sampling: Sampling, env: ServerEnv) -> WireError | None:
    for field, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        value = getattr(sampling, field)
        asked = env.vocabulary if value == -1 else value
        if asked is not None and asked > env.max_logprobs >= 0:
            told = f"Requested {kind} logprobs of {asked}, which is greater than max allowed: {env.max_logprobs}"
            return parameter_error(told, field, asked)
    return None


def _bias_outside(sampling: Sampling, env: ServerEnv) -> WireError | None:
    outside = [int(key) for key in sampling.logit_bias or () if not 0 <= int(key) < env.vocabulary]
    return _outside("logit_bias", outside, env) if outside else None


def _ids_outside(sampling: Sampling, env: ServerEnv) -> WireError | None:
    for field in ("stop_token_ids", "allowed_token_ids"):
        outside = [token for token in getattr(sampling, field) or () if not 0 <= token < env.vocabulary]
        if outside:
            return _outside(field, outside, env)
    if sampling.allowed_token_ids is not None and len(sampling.allowed_token_ids) == 0:
        return parameter_error("allowed_token_ids is not None and empty!", "allowed_token_ids", [])
    return None


def _outside(field: str, token_ids: list[int], env: ServerEnv) -> WireError:
    told = f"{field} has token id(s) {token_ids} that are out-of-vocab. Vocabulary size: {env.vocabulary}"
    return parameter_error(told, field, token_ids)


def _budget_without_reasoning(sampling: Sampling, env: ServerEnv) -> WireError | None:
    if sampling.thinking_token_budget is None or env.reasoning_parser is not None:
        return None
    return WireError("thinking_token_budget needs a server with --reasoning-parser (or --reasoning-config)")


def _bad_prompt(prompts: Sequence[Sequence[int]], env: ServerEnv) -> WireError | None:
    for token_ids in prompts:
        if not token_ids:
            return WireError("The decoder prompt cannot be empty")
        highest = highest_token_id(token_ids)
        if highest >= env.vocabulary:
            return WireError(f"Token id {highest} is out of vocabulary")
    return None
