"""Text, stop strings and finish reasons of one choice (vLLM reference §2.4, §3.1)."""

from collections.abc import Sequence

import pytest

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.family import Delta, SamplingPlan
from windtunnel.wire.output import ChoiceState, find_stop, merge, synthetic_logprobs

TOKENIZER = BuiltinTokenizer()


def _run(state: ChoiceState, tokens: Sequence[int]) -> list[Delta]:
    deltas = []
    for token in tokens:
        delta = state.push((token,))
        if delta is not None:
            deltas.append(delta)
        if state.stopped_by is not None:
            break
    return deltas


def _state(**options: object) -> ChoiceState:
    return ChoiceState(0, 0, SamplingPlan(max_tokens=64, **options), TOKENIZER)  # type: ignore[arg-type]


def test_plain_tokens_come_one_by_one_and_add_up() -> None:
    state = _state()
    tokens = TOKENIZER.encode(" apple banana cherry")
    assert [delta.text for delta in _run(state, tokens)] == [" apple", " banana", " cherry"]
    last = state.push((TOKENIZER.eos_token_id,), "stop", None)
    assert last == Delta(0, "", (TOKENIZER.eos_token_id,), None, "stop", None)
    result = state.result()
    assert (result.text, result.finish_reason, len(result.token_ids)) == (" apple banana cherry", "stop", 4)
    assert state.completion_tokens == 4


def test_split_character_is_held_back_until_whole() -> None:
    tokens = TOKENIZER.encode("né")
    deltas = _run(_state(), tokens)
    assert [delta.text for delta in deltas] == ["n", "", "é"]


def test_unfinished_character_at_the_end_is_dropped() -> None:
    state = _state()
    first = TOKENIZER.encode("é")[0]
    delta = state.push((first,), "length", None)
    assert delta is not None and delta.text == "" and delta.finish_reason == "length"


def test_stop_string_over_several_tokens_holds_back_its_length_less_one() -> None:
    state = _state(stop=(" banana split",))
    deltas = _run(state, TOKENIZER.encode(" apple banana cherry banana split more"))
    assert "".join(delta.text for delta in deltas) == " apple banana cherry"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, state.stopped_by) == ("stop", " banana split", " banana split")
    assert deltas[0].token_ids, "an output whose text is held back is still a delta"
    assert [delta.text for delta in deltas[:2]] == ["", " "], "13 characters seen, 12 held back"


def test_held_text_is_given_when_the_answer_ends_without_the_stop() -> None:
    state = _state(stop=(" banana split",))
    tokens = tuple(TOKENIZER.encode(" apple banana"))
    delta = state.push(tokens, "length", None)
    assert delta is not None and delta.text == " apple banana"


def test_include_stop_string_shows_it_and_holds_nothing_back() -> None:
    state = _state(stop=(" cherry",), include_stop_str=True)
    deltas = _run(state, TOKENIZER.encode(" apple cherry banana"))
    assert [delta.text for delta in deltas] == [" apple", " cherry"]


def test_stop_inside_a_token_cuts_the_token() -> None:
    state = _state(stop=("nan",))
    assert "".join(delta.text for delta in _run(state, TOKENIZER.encode(" apple banana cherry"))) == " apple ba"


def test_min_tokens_shields_early_text_from_stop_strings() -> None:
    state = _state(stop=(" apple",), min_tokens=2)
    assert len(_run(state, TOKENIZER.encode(" apple banana apple cherry"))) == 3
    assert state.result().text == " apple banana"


def test_stop_token_is_counted_but_not_shown() -> None:
    state = _state(stop_token_ids=(7,))
    cherry = TOKENIZER.encode(" cherry")[0]
    delta = state.push((TOKENIZER.encode(" apple")[0], cherry), "stop", cherry)
    assert delta is not None
    assert (delta.text, delta.stop_reason, len(delta.token_ids)) == (" apple", cherry, 2)


def test_nothing_is_said_without_tokens_or_finish() -> None:
    assert _state().push(()) is None


def test_abort_without_token_is_a_last_delta() -> None:
    delta = _state().push((), "abort", None)
    assert delta == Delta(0, "", (), None, "abort", None)


def test_repetition_has_its_own_stop_reason() -> None:
    delta = _state().push((400,), "repetition", None)
    assert delta is not None and delta.stop_reason == "repetition_detected"


def test_stream_interval_sends_first_and_last_at_once() -> None:
    state = ChoiceState(0, 0, SamplingPlan(max_tokens=8), TOKENIZER, stream_interval=3)
    tokens = TOKENIZER.encode(" apple banana cherry apple banana cherry apple banana")
    sizes = [len(delta.token_ids) for delta in _run(state, tokens[:-1])]
    last = state.push((tokens[-1],), "length", None)
    assert sizes == [1, 3, 3] and last is not None and len(last.token_ids) == 1


def test_merge_joins_text_tokens_and_takes_the_later_end() -> None:
    merged = merge(Delta(1, "a", (1,)), Delta(1, "b", (2, 3), None, "length", None))
    assert merged == Delta(1, "ab", (1, 2, 3), None, "length", None)


@pytest.mark.parametrize("alternatives", [0, 1, 5])
def test_logprobs_are_sorted_finite_and_repeatable(alternatives: int) -> None:
    entry = synthetic_logprobs(400, 3, alternatives, TOKENIZER)
    assert entry == synthetic_logprobs(400, 3, alternatives, TOKENIZER)
    values = [logprob for _id, _text, logprob in entry.top]
    assert len(values) == alternatives and values == sorted(values, reverse=True)
    assert all(-9999.0 < value <= 0 for value in [entry.logprob, *values])
    assert len({token for token, _text, _logprob in entry.top}) == alternatives


def test_logprobs_cover_every_token_of_a_delta() -> None:
    state = _state(logprobs=2)
    delta = state.push(tuple(TOKENIZER.encode(" apple banana")))
    assert delta is not None and delta.logprobs is not None
    assert [entry.token for entry in delta.logprobs] == [" apple", " banana"]


def test_streams_forget_what_they_handed_out() -> None:
    state = ChoiceState(0, 0, SamplingPlan(max_tokens=8), TOKENIZER, keep=False)
    _run(state, TOKENIZER.encode(" apple banana"))
    assert state.result().text == "" and state.completion_tokens == 2


def test_find_stop_takes_list_order_and_only_looks_at_new_endings() -> None:
    assert find_stop("one two", 0, ("two", "one")) == ("two", 4)
    assert find_stop("one two", 3, ("one",)) is None
