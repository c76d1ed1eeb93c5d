"""The built-in tokenizer is reversible, for all of Unicode, whole and in parts."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windtunnel.core import oracle
from windtunnel.core import tokenizer as tokenizer_module
from windtunnel.core.tokenizer import SPECIAL_TOKENS, BuiltinTokenizer, TemplateOptions
from windtunnel.core.words import WORDS

TOKENIZER = BuiltinTokenizer()
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=80) | st.text(
    "ab <|>_imstartend é\ud800\udc00😀\n", max_size=60
)
any_tokens = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=40)


@given(any_text)
@example("\ud83d\ude00")
@example("\udc00\ud800")
@example("<|im_start|>user\nhello<|im_end|>")
@example("é" * 9 + "\x00\x7f\x80")
def test_every_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == text
    assert all(0 <= token < TOKENIZER.vocab_size for token in tokens)


@given(any_text)
def test_without_specials_the_default_decoding_comes_back_too(text: str) -> None:
    if not any(special in text for special in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(any_tokens, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_parts_join_to_the_whole(tokens: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    parts = [detokenizer.push(tokens[start:stop]) for start, stop in pairwise(bounds)]
    assert "".join(parts) + detokenizer.flush() == TOKENIZER.decode(tokens, skip_special_tokens=skip)


@given(any_tokens)
def test_any_tokens_have_a_text_that_can_be_sent(tokens: list[int]) -> None:
    text = TOKENIZER.decode(tokens)
    assert isinstance(text, str)
    text.encode("utf-8", "surrogatepass")


@given(any_text)
def test_a_text_in_single_tokens_never_shows_a_replacement_that_is_not_there(text: str) -> None:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=False)
    parts = [detokenizer.push([token]) for token in TOKENIZER.encode(text)]
    assert "".join(parts) == text
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20))
def test_plain_text_is_what_the_detokenizer_says(tokens: list[int]) -> None:
    plain = [TOKENIZER.plain_text[token] for token in tokens]
    if all(text is not None for text in plain):
        assert "".join(filter(None, plain)) == TOKENIZER.decode(tokens)


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    first_byte = TOKENIZER.encode("é")[:1]
    detokenizer = TOKENIZER.detokenizer()
    assert detokenizer.push(first_byte) == ""
    assert detokenizer.flush() == "\ufffd"


def test_each_oracle_word_is_one_token_and_answers_encode_to_themselves() -> None:
    assert [TOKENIZER.decode(list(tokens)) for tokens in TOKENIZER.oracle_token_ids] == [f" {word}" for word in WORDS]
    text = oracle.text(99, 200)
    assert [(token,) for token in TOKENIZER.encode(text)] == [
        TOKENIZER.oracle_token_ids[index] for index in oracle.word_indices(99, 0, 200)
    ]


def test_english_costs_about_a_token_for_three_characters() -> None:
    text = "The scheduler admits the first request of the queue while places and memory last. " * 5
    assert 2.7 <= len(text) / len(TOKENIZER.encode(text)) <= 4


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert TOKENIZER.apply_chat_template(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.apply_chat_template(messages, TemplateOptions(continue_final_message=True)).endswith("user\nHi")
    assert TOKENIZER.apply_chat_template(messages, TemplateOptions(add_generation_prompt=False)).endswith("Hi<|im_end|>\n")
    with pytest.raises(ValueError, match="one fixed chat template"):
        TOKENIZER.apply_chat_template(messages, TemplateOptions(chat_template="{{ messages }}"))


def test_special_tokens_are_single_tokens_and_hidden_by_default() -> None:
    for number, special in enumerate(SPECIAL_TOKENS):
        assert TOKENIZER.encode(special) == [number]
        assert TOKENIZER.token_string(number) == special
    assert TOKENIZER.decode(TOKENIZER.encode("a<|im_end|>b")) == "ab"
    assert TOKENIZER.eos_token_id == TOKENIZER.encode("<|im_end|>")[0]


@given(st.text(alphabet="abcz AZ09\n\t<|'.,é漢\U0001f600\x00\x7f", max_size=300), st.integers(1, 20))
def test_a_text_cut_into_chunks_has_the_same_tokens(text: str, chunk: int) -> None:
    whole = TOKENIZER.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_CHUNK_BYTES", chunk)
        assert TOKENIZER.encode(text) == whole
