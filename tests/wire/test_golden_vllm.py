"""Recorded vLLM 0.32.0 cases against the families in this process: plan, frames, bodies and errors."""

from functools import lru_cache
from pathlib import Path

import pytest
from tests.conformance import cases, compare, local, responses

from windtunnel.core.tokenizer import Tokenizer
from windtunnel.serve.tokenizers import load_tokenizer
from windtunnel.wire.recorded import RecordedPlayer, RecordedResponses

FOLDER = cases.golden_folder()
GROUPS = ("completions", "chat", "tokenize", "tools_extra", "misc", "probe", "responses", "messages", "variant_b", "variant_c")
CONNECTION_HEADERS = ("server", "connection", "transfer-encoding", "x-request-id")
"""Headers that the HTTP layer adds; `make conformance` compares them."""
ELSEWHERE = frozenset({"variant_b__lora_use", "variant_b__responses_background"})
"""Needs an adapter that is loaded at run time; needs a server's store."""

pytestmark = pytest.mark.skipif(FOLDER is None, reason="no recordings: WINDTUNNEL_GOLDEN does not hold vllm/cases")


def _titles() -> list[str]:
    if FOLDER is None:
        return []
    found = [case for group in GROUPS for case in cases.load(FOLDER, (group,))]
    return [case.title for case in found if _is_ours(case)]


def _is_ours(case: cases.Case) -> bool:
    path = case.path.partition("?")[0]
    plain = (*local.SIMPLE, "/v1/models", "/version")
    generating = path in local.FAMILIES and case.method == "POST"
    simple = path in plain and case.method == ("POST" if path in local.SIMPLE else "GET")
    return (generating or simple) and case.expected.status != 401 and case.title not in ELSEWHERE


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return load_tokenizer(folder())


def folder() -> Path:
    assert FOLDER is not None
    return FOLDER


@pytest.mark.parametrize("title", _titles())
def test_recorded_case(title: str) -> None:
    case = cases.read(folder() / "cases" / f"{title}.json")
    tokenizer = _tokenizer()
    player = RecordedPlayer(RecordedResponses(responses.lines([case], tokenizer), tokenizer))
    answer = local.answer(case, local.environment(case.group, tokenizer), player)
    assert answer is not None
    lines = compare.differences(case.expected, answer)
    assert [line for line in lines if not any(line.startswith(f"header {name}") for name in CONNECTION_HEADERS)] == []


def test_there_are_many_cases() -> None:
    assert len(_titles()) > 250
