"""Token sources are functions of position; the oracle's tokens are the oracle's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core import oracle
from windtunnel.core.request import TokenSource
from windtunnel.core.sources import EchoSource, OracleSource, SequenceSource
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.core.words import WORDS

SINGLE = tuple((token,) for token in range(len(WORDS)))
PIECES = tuple(tuple(range(word * 4, word * 4 + 1 + word % 3)) for word in range(len(WORDS)))
identities = st.integers(0, 2**64 - 1)


def everything(source: TokenSource, limit: int = 5_000) -> list[int]:
    return list(source.token_ids(0, limit))


sources = st.one_of(
    st.builds(
        OracleSource,
        identities,
        st.sampled_from([SINGLE, PIECES]),
        st.none() | st.integers(0, 700),
        min_tokens=st.integers(0, 90),
    ),
    st.builds(
        SequenceSource, st.lists(st.integers(0, 99), max_size=20), ignore_eos=st.booleans(), min_tokens=st.integers(0, 50)
    ),
)


@given(sources, st.lists(st.tuples(st.integers(0, 900), st.integers(0, 300)), max_size=6))
def test_a_source_is_a_function_of_position(source: TokenSource, asked: list[tuple[int, int]]) -> None:
    answers = [list(source.token_ids(start, count)) for start, count in asked]
    whole = everything(source)
    assert answers == [whole[start : start + count] for start, count in asked]


@given(identities, st.integers(0, 2**40), st.integers(0, 1100))
def test_words_are_the_same_one_by_one_and_many_at_once(identity: int, start: int, count: int) -> None:
    indices = oracle.word_indices(identity, start, count)
    assert len(indices) == count
    for at in {0, 1, 15, 16, 17, count - 1} & set(range(count)):
        assert oracle.word_indices(identity, start + at, 1) == [indices[at]]


def splitmix64(state: int) -> int:
    """The reference algorithm, one number at a time."""
    mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@given(identities, st.integers(0, 2**40), st.integers(0, 1100))
def test_words_are_nine_bits_each_of_the_reference_generator(identity: int, start: int, count: int) -> None:
    expected = []
    for at in range(start, start + count):
        mixed = splitmix64((identity + (at // 7 + 1) * 0x9E3779B97F4A7C15) % 2**64)
        expected.append(mixed >> 9 * (at % 7) & 511)
    assert oracle.word_indices(identity, start, count) == expected


@given(identities, st.integers(0, 300))
def test_the_builtin_tokenizer_writes_what_the_oracle_says(identity: int, length: int) -> None:
    tokenizer = BuiltinTokenizer()
    source = OracleSource(identity, tokenizer.oracle_token_ids, length)
    text = tokenizer.decode(everything(source))
    assert text == oracle.text(identity, length)
    assert oracle.first_difference(identity, text.split()) is None


@given(identities, st.integers(0, 200), st.integers(0, 400))
def test_words_of_several_tokens_end_whole(identity: int, length: int, min_tokens: int) -> None:
    tokens = everything(OracleSource(identity, PIECES, length, min_tokens=min_tokens))
    words = oracle.word_indices(identity, 0, 1000)
    count = 0
    while count < length or sum(len(PIECES[word]) for word in words[:count]) < min_tokens:
        count += 1
    assert tokens == [token for word in words[:count] for token in PIECES[word]]


def test_without_a_natural_length_the_oracle_never_ends() -> None:
    assert len(OracleSource(1, SINGLE, None).token_ids(10_000, 5_000)) == 5_000


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        (SequenceSource([1, 2, 3]), [1, 2, 3]),
        (SequenceSource([1, 2, 3], min_tokens=5), [1, 2, 3, 1, 2]),
        (SequenceSource([1, 2, 3], ignore_eos=True), [1, 2, 3, 1, 2, 3, 1]),
        (SequenceSource([]), []),
        (SequenceSource([], ignore_eos=True, min_tokens=4), []),
        (EchoSource([7, 8]), [7, 8]),
        (EchoSource([7, 8], ignore_eos=True), [7, 8, 7, 8, 7, 8, 7]),
    ],
)
def test_given_tokens_end_repeat_or_are_prolonged(source: TokenSource, tokens: list[int]) -> None:
    assert everything(source, 7) == tokens


def test_a_marker_names_the_answer_through_any_template() -> None:
    text = f"<|im_start|>user\n{oracle.marker(0)} [wt:zz] {oracle.marker(255)}<|im_end|>"
    assert oracle.identity_of_marker(text) == oracle.identity_of_tag("ff") == oracle.identity_of_tag("00ff")
    assert oracle.identity_of_marker("no marker") is None
    assert oracle.child_identity(5, 0) == 5
    assert len({oracle.child_identity(5, index) for index in range(50)}) == 50


@given(identities, st.integers(0, 30), st.integers(0, 30), st.data())
def test_first_difference_finds_any_fault(identity: int, length: int, at: int, data: st.DataObject) -> None:
    words = oracle.words(identity, 0, length)
    assert oracle.first_difference(identity, words) is None
    if at < length:
        words[at] = data.draw(st.sampled_from([word for word in WORDS if word != words[at]]))
        assert oracle.first_difference(identity, words) == at


@given(identities, st.integers(0, 50), st.integers(0, 50))
def test_natural_length_lies_between_its_bounds(identity: int, low: int, more: int) -> None:
    assert low <= oracle.natural_length(identity, low, low + more) <= low + more
