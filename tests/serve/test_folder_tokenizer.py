"""Tokenizers of a folder, made here: how an answer's first text begins depends on the prompt before it."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from windtunnel.serve.tokenizers import FolderTokenizer
from windtunnel.wire.family import SamplingPlan
from windtunnel.wire.output import PROMPT_END, ChoiceState

WORDS = ("▁so", "▁it", "▁goes", "<unk>")


def tokenizer() -> FolderTokenizer:
    """Like SentencePiece's: a word and the space before it are one piece."""
    inner = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    inner.decoder = decoders.Metaspace()  # type: ignore[assignment]
    return FolderTokenizer(inner, {}, None)


def with_bytes() -> FolderTokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁goes": 256}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])  # type: ignore[assignment]
    return FolderTokenizer(inner, {}, None)


@pytest.mark.parametrize(("prompt", "text"), [((0, 1), " goes it"), ((0,) * 5000, " goes it"), ((), "goes it")])
def test_the_first_token_of_an_answer_keeps_its_space_behind_a_prompt(prompt: tuple[int, ...], text: str) -> None:
    """vLLM 0.33 and SGLang 0.5.23 prime their detokenizers with the prompt."""
    state = ChoiceState(0, 0, SamplingPlan(max_tokens=4), tokenizer(), after=prompt)
    said: list[Any] = [state.push((2,)), state.push((1,))]
    assert "".join(delta.text for delta in said) == text
    assert len(state._after) <= PROMPT_END


def test_a_prompt_s_number_that_is_no_token_has_no_text() -> None:
    """vLLM's derender takes any as the prompt of what is derendered."""
    assert tokenizer().detokenizer(after=(0, 1 << 40)).push((2,)) == " goes"


def test_an_end_of_the_prompt_that_is_cut_within_a_character_is_no_part_of_the_answer() -> None:
    """A vocabulary with bytes to fall back on decodes a run of them as a whole or not at all."""
    smiles = tuple("🙂🙂".encode())
    state = ChoiceState(0, 0, SamplingPlan(max_tokens=4), with_bytes(), after=smiles)
    assert len(smiles) == PROMPT_END + 1
    assert state.push((256, 256)).text == " goes goes"


@pytest.mark.parametrize("pushes", [[(0x41, 0x80, 256, 256)], [(0x41,), (0x80,), (256,), (256,)]], ids=["once", "one by one"])
def test_bytes_that_take_back_the_text_before_them_break_no_answer(pushes: list[tuple[int, ...]]) -> None:
    """`A` and a byte that begins no character decode to two signs for none: the library has said `A` already, and raises."""
    detokenizer = with_bytes().detokenizer()
    assert "".join(detokenizer.push(push) for push in pushes) == "A goes goes"


def test_another_error_of_the_library_is_raised() -> None:
    with pytest.raises(TypeError):
        with_bytes().detokenizer().push(("no token",))  # type: ignore[arg-type]
