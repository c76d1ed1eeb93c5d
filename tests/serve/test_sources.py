"""The identity of a prompt that came as token ids: its last marker, wherever it stands."""

import pytest

from windtunnel.core import oracle
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.serve import sources
from windtunnel.serve.config import GenerationConfig
from windtunnel.serve.sources import SourceMaker
from windtunnel.wire.family import PromptPlan
from windtunnel.wire.vllm.prompts import highest_token_id

TOKENIZER = BuiltinTokenizer()
MAKER = SourceMaker(GenerationConfig(), TOKENIZER)
LONGEST = oracle.marker((1 << 128) - 1)


def identity(text: str) -> int:
    return MAKER.identity(PromptPlan(tuple(TOKENIZER.encode(text)), None))


@pytest.mark.parametrize("before", range(0, 60, 7))
@pytest.mark.parametrize("after", range(0, 60, 7))
def test_the_last_marker_is_found_across_windows(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WINDOW_TOKENS", 16)
    text = f"[wt:1] {'x ' * before}{LONGEST}{' y' * after}"
    assert identity(text) == oracle.identity_of_marker(text) == oracle.identity_of_tag("f" * 32)


def test_without_a_marker_the_tokens_count() -> None:
    ids = tuple(TOKENIZER.encode("no marker [wt:xyz] here " * 1000))
    assert MAKER.identity(PromptPlan(ids, None)) == oracle.identity_of_tokens(ids)
    assert oracle.identity_of_tokens(ids) != oracle.identity_of_tokens(ids[:-1])


def test_an_identity_made_beforehand_is_taken() -> None:
    assert MAKER.identity(PromptPlan((1, 2), None, identity=7)) == 7


def test_the_highest_token_id_of_a_long_prompt() -> None:
    assert highest_token_id([]) == 0
    assert highest_token_id([5]) == 5
    assert [highest_token_id([0] * at + [9] + [0] * (9000 - at)) for at in (0, 4095, 4096, 9000)] == [9] * 4
