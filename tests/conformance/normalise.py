"""What may differ between a recorded answer and ours: a table, each row with its reason. Everything else must be equal.

A value is free only at the places of its row and only when both sides have the form that the row asks for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class Free:
    """Values at `path` (a regular expression over `a.b[].c`) may differ when `same_form` says so."""

    path: str
    same_form: Check
    reason: str


def both_match(pattern: str) -> Check:
    compiled = re.compile(pattern)
    return lambda want, have: all(isinstance(side, str) and compiled.fullmatch(side) is not None for side in (want, have))


def both_numbers(want: Any, have: Any) -> bool:
    return all(isinstance(side, int | float) and not isinstance(side, bool) for side in (want, have))


def both_strings(want: Any, have: Any) -> bool:
    return isinstance(want, str) and isinstance(have, str)


def both_bytes(want: Any, have: Any) -> bool:
    return isinstance(want, int) and isinstance(have, int)


def both_maps(want: Any, have: Any) -> bool:
    """Maps of alternatives: at most one entry more or less (the sampled token is in the list or beside it)."""
    return isinstance(want, dict) and isinstance(have, dict) and abs(len(want) - len(have)) <= 1


def number_or_null(want: Any, have: Any) -> bool:
    return want is None or have is None or both_numbers(want, have)


_HEX = "[0-9a-f]"
_PREFIXES = "cmpl|chatcmpl|resp|msg|rs|fc|call|chatcmpl-tool|modelperm|generate-tokens|generative-scoring"
_GENERATED = rf"({_PREFIXES})[-_]{_HEX}{{12,32}}"
_TOP = r"(.*\.)?logprobs\.content\[\]\.top_logprobs\[\]"

TABLE: tuple[Free, ...] = (
    Free(
        r"(.*\.)?(id|request_id|item_id|call_id)",
        both_match(_GENERATED),
        "ids are random; their prefix and alphabet are compared",
    ),
    Free(r"(.*\.)?signature", both_match(rf"{_HEX}{{32}}"), "signatures of thinking blocks are random"),
    Free(r"data\[\]\.score", both_numbers, "probabilities of a model that is not there"),
    Free(r"(.*\.)?created(_at)?", both_numbers, "the time of the call"),
    Free(
        r"system_fingerprint", both_match(rf"vllm-0\.32\.0-{_HEX}{{8}}"), "a digest of the configuration; its form is compared"
    ),
    Free(r"(response\.)?metrics\.[a-z_]+", number_or_null, "measured times"),
    Free(r"(.*\.)?logprobs\.token_logprobs\[\]", number_or_null, "probabilities of a model that is not there"),
    Free(r"(.*\.)?logprobs\.top_logprobs\[\]", both_maps, "which alternatives a model had, and how likely they were"),
    Free(r"(.*\.)?logprobs\.content\[\]\.logprob", both_numbers, "probabilities of a model that is not there"),
    Free(_TOP + r"\.logprob", both_numbers, "probabilities of a model that is not there"),
    Free(r"(.*\.)?logprobs\.content\[\]\.(top_logprobs\[\]\.)?rank", both_numbers, "how likely the model thought a token"),
    Free(_TOP + r"\.token_id", both_numbers, "which alternatives a model had"),
    Free(_TOP + r"\.token", both_strings, "which alternatives a model had"),
    Free(_TOP + r"\.bytes\[\]", both_bytes, "the bytes of those alternatives"),
    Free(r"(.*\.)?prompt_logprobs\[\]", both_maps, "which alternatives a model had, and how likely they were"),
)

FREE_LENGTHS = re.compile(_TOP + r"\.bytes")
"""Lists whose length may differ: the bytes of an alternative."""

IGNORED_HEADERS = frozenset({"date", "content-length"})
"""`date` is the time; `content-length` follows from ids, times and sentences of other lengths."""

PRESENT_HEADERS = frozenset({"x-request-id"})
"""Headers with a random value: both sides must have them."""

DIAGNOSTIC = re.compile(r"^(Grammar error|Invalid grammar specification|Failed to convert)", re.IGNORECASE)
"""Sentences of the grammar compilers that vLLM links (llguidance, xgrammar): status, type, param and code are compared."""

_SUFFIX = re.compile(r" \((parameter=.*)\)$", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
_QUOTED = re.compile(r"[`'\"]([\w./-]+)[`'\"]")

PHRASES = ("maximum context length", "does not exist", "must be set", "out of range", "Not Found", "Unauthorized")
"""Short phrases that public clients match on: a recorded sentence that has one needs it in ours."""


def sentence_difference(want: str, have: str) -> str | None:
    """Why an error sentence of ours does not say what the recorded one says; None when it does.

    Lines of the validation library must be equal. Other sentences are our own words, but end in the same parameter and
    value, name the same numbers and quoted names, and keep the phrases that clients match on.
    """
    if want == have:
        return None
    if "validation error" in want.partition("\n")[0]:
        return "validation lines differ"
    if DIAGNOSTIC.match(want):
        return None if DIAGNOSTIC.match(have) else "no grammar diagnostic"
    return _missing_facts(want, have)


def _missing_facts(want: str, have: str) -> str | None:
    suffixes = [match.group(1) if match else None for match in (_SUFFIX.search(want), _SUFFIX.search(have))]
    if suffixes[0] != suffixes[1]:
        return f"ends in {suffixes[1]!r} instead of {suffixes[0]!r}"
    for kind, pattern in (("number", _NUMBER), ("name", _QUOTED)):
        missing = [fact for fact in pattern.findall(want) if fact not in have]
        if missing:
            return f"does not name the {kind} {missing[0]!r}"
    lost = [phrase for phrase in PHRASES if phrase in want and phrase not in have]
    return f"has lost the phrase {lost[0]!r}" if lost else None
