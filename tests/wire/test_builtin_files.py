"""A router that loads these files has the built-in tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.core.tokenizer import BuiltinTokenizer, TemplateOptions, Tokenizer
from windtunnel.core.words import WORDS
from windtunnel.serve.tokenizers import load_tokenizer
from windtunnel.wire.builtin_files import tokenizer_files

BUILTIN = BuiltinTokenizer()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    return load_tokenizer(folder)


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.sampled_from("ab z.,!?<|>\n\tA0é€")),
    st.lists(st.sampled_from([*WORDS[:40], "ab", "abcd", "!", "<|im_end|>", "</s>", "[wt:7f]"])).map(" ".join),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_the_same_ids_for_every_text(loaded: Tokenizer, text: str) -> None:
    assert loaded.encode(text) == BUILTIN.encode(text)
    assert loaded.decode(BUILTIN.encode(text), skip_special_tokens=False) == text


class Batches:
    """The library's tokenizer, of which only batches may be asked for: elsewhere it lets no other thread run."""

    def __init__(self, inner: Any) -> None:
        self.encode_batch_fast = inner.encode_batch_fast


def test_a_long_text_is_encoded_as_a_batch(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Hello there, [wt:7] </s> é " * 400
    expected = loaded.encode(text[:4000]), loaded._inner.encode(text).ids
    monkeypatch.setattr(loaded, "_inner", Batches(loaded._inner))
    assert loaded.encode(text) == expected[1] == BUILTIN.encode(text)
    with pytest.raises(AttributeError):
        loaded.encode(text[:4000])


def test_oracle_words_are_one_token_each(loaded: Tokenizer) -> None:
    assert [list(ids) for ids in loaded.oracle_token_ids] == [list(ids) for ids in BUILTIN.oracle_token_ids]
    assert loaded.eos_token_id == BUILTIN.eos_token_id


@pytest.mark.parametrize("add", [True, False])
def test_the_same_conversations(loaded: Tokenizer, add: bool) -> None:
    messages = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  [wt:7]"},
    ]
    expected = BUILTIN.apply_chat_template(messages, TemplateOptions(add_generation_prompt=add))
    assert loaded.apply_chat_template(messages, TemplateOptions(add_generation_prompt=add)) == expected
