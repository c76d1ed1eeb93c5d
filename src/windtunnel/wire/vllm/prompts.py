"""From prompt text or token ids to `PromptPlan`s, with the context-length checks (vLLM reference §2.6)."""

from collections.abc import Sequence
from dataclasses import replace

from windtunnel.core.request import MediaItem
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import PromptPlan, WireError
from windtunnel.wire.http import parameter_error

MAX_PROMPTS = 1024
_TOKENS_AT_ONCE = 4096


def from_text(
    text: str, env: ServerEnv, *, add_special_tokens: bool, keep: int | None = None, side: str | None = None
) -> PromptPlan:
    """Tokenise and check one text. `keep` is `truncate_prompt_tokens`, `side` the end that is cut off."""
    check_encodable(text)
    if keep is None and len(text) > env.max_prompt_chars:
        raise _too_many_characters(len(text), env)
    token_ids = env.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return _checked(_truncated(token_ids, env, keep, side), text, env, exact=False)


def with_media(text: str, mark: str, media: Sequence[str], env: ServerEnv, *, add_special_tokens: bool) -> PromptPlan:
    """Tokenise a text in which each `mark` stands for the next of `media`, which takes `env.media_tokens` placeholder tokens.

    The placeholder is the last id of the vocabulary.
    """
    check_encodable(text)
    pieces = text.split(mark)
    if len(pieces) != len(media) + 1:
        raise WireError(f"The prompt has {len(pieces) - 1} places for {len(media)} images, sounds or films")
    token_ids = list(env.tokenizer.encode(pieces[0], add_special_tokens=add_special_tokens))
    items = []
    for identifier, piece in zip(media, pieces[1:], strict=True):
        items.append(MediaItem(identifier, len(token_ids), env.media_tokens))
        token_ids += [env.vocabulary - 1] * env.media_tokens
        token_ids += env.tokenizer.encode(piece, add_special_tokens=False)
    return replace(_checked(token_ids, "".join(pieces), env, exact=False), media=tuple(items))


def from_token_ids(token_ids: Sequence[int], env: ServerEnv, *, keep: int | None = None, side: str | None = None) -> PromptPlan:
    return _checked(_truncated(token_ids, env, keep, side), None, env, exact=True)


def check_encodable(text: str) -> None:
    """Raises the tokenizer's own complaint for text that is no Unicode (lone surrogates)."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise WireError(message) from None


def highest_token_id(token_ids: Sequence[int]) -> int:
    """The largest, 0 of none. In parts: one call over a long prompt would hold every other thread for milliseconds."""
    highest = 0
    for at in range(0, len(token_ids), _TOKENS_AT_ONCE):
        highest = max(highest, *token_ids[at : at + _TOKENS_AT_ONCE])
    return highest


def check_vocabulary(token_ids: Sequence[int], env: ServerEnv) -> None:
    highest = highest_token_id(token_ids)
    if highest >= env.vocabulary:
        raise WireError(f"Token id {highest} is out of vocabulary")


def _truncated(token_ids: Sequence[int], env: ServerEnv, keep: int | None, side: str | None) -> Sequence[int]:
    if keep is None:
        return token_ids
    limit = env.max_model_len if keep == -1 else keep
    if limit > env.max_model_len:
        told = f"truncate_prompt_tokens={limit} is more than max_model_len={env.max_model_len} allows; ask for fewer"
        raise parameter_error(told, "truncate_prompt_tokens", limit)
    if len(token_ids) <= limit:
        return token_ids
    return token_ids[:limit] if side == "right" else token_ids[len(token_ids) - limit :]


def _checked(token_ids: Sequence[int], text: str | None, env: ServerEnv, *, exact: bool) -> PromptPlan:
    limit = env.max_model_len
    if len(token_ids) > limit:
        count = len(token_ids) if exact else limit + 1
        told = (
            f"This model's maximum context length is {limit} tokens. Your prompt has at least {count} input tokens, "
            "so there is no room even without any output; shorten the prompt."
        )
        raise parameter_error(told, "input_tokens", count)
    return PromptPlan(tuple(token_ids), text)


def _too_many_characters(count: int, env: ServerEnv) -> WireError:
    limit = env.max_model_len
    told = (
        f"This model's maximum context length is {limit} tokens. Your prompt has {count} characters, and no text of more "
        f"than {env.max_prompt_chars} characters fits into {limit} input tokens; shorten the prompt."
    )
    return parameter_error(told, "input_text", count)
