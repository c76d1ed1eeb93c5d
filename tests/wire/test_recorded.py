"""Recorded responses: the file, the lookup, the turns."""

import json

import pytest

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.family import PromptPlan
from windtunnel.wire.recorded import RecordedPlayer, RecordedResponses, body_hash, read_lines

TOKENIZER = BuiltinTokenizer()
APPLE = PromptPlan(tuple(TOKENIZER.encode(" apple")), " apple")
OTHER = PromptPlan((7, 8), None)


def _player(*lines: object) -> RecordedPlayer:
    text = "\n".join(json.dumps(line) for line in lines)
    return RecordedPlayer(RecordedResponses(read_lines(text), TOKENIZER))


def test_key_order_and_spaces_of_a_body_do_not_matter() -> None:
    assert body_hash(b'{"a": 1, "b": [2]}') == body_hash(b'{"b":[2],"a":1}')
    assert body_hash(b"{") is None


def test_the_body_is_the_most_exact_match() -> None:
    body = b'{"prompt": " apple"}'
    player = _player(
        {"match": {"prompt": " apple"}, "choices": [{"token_ids": [1]}]},
        {"match": {"body": body_hash(body)}, "choices": [{"token_ids": [2]}], "cached_tokens": 3},
    )
    exact = player.play(body, [APPLE], 1)
    assert exact is not None and (exact.choices, exact.cached_tokens) == (((2,),), 3)
    other = player.play(b'{"prompt": " apple", "n": 1}', [APPLE], 1)
    assert other is not None and (other.choices, other.cached_tokens) == (((1,),), None)


def test_prompts_by_text_or_tokens_and_choices_in_turn() -> None:
    player = _player(
        {"match": {"prompt_token_ids": [7, 8]}, "choices": [{"text": " apple"}, {"token_ids": [9]}]},
        {"match": {"prompt": " apple"}, "choices": [{"token_ids": [1]}]},
        {"match": {"prompt": " apple"}, "choices": [{"token_ids": [2]}]},
    )
    apple = tuple(TOKENIZER.encode(" apple"))
    first = player.play(b"{}", [OTHER, APPLE], 2)
    assert first is not None and first.choices == (apple, (9,), (1,), (1,))
    second = player.play(b"{}", [APPLE], 1)
    third = player.play(b"{}", [APPLE], 1)
    assert second is not None and second.choices == ((2,),)
    assert third is not None and third.choices == ((1,),), "after the last line the first again"
    assert player.play(b"{}", [PromptPlan((1,), "x")], 1) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "line 1: expected a JSON object"),
        ("{", "line 1"),
        ('{"match": {}, "choices": []}', "exactly one of"),
        ('{"match": {"prompt": "a"}}', "`choices`"),
        ('{"match": {"prompt": "a"}, "choices": [{}]}', "`token_ids` or `text`"),
        ('{"match": {"prompt": "a"}, "choices": [{"text": "b", "foo": 1}]}', "no key 'foo'"),
        ('{"match": {"prompt": "a"}, "choices": [{"text": "b"}], "typo": 1}', "unknown key 'typo'"),
    ],
)
def test_bad_lines_are_named(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RecordedResponses(read_lines(line), TOKENIZER)
