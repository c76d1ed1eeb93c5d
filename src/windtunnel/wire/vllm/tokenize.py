"""`/tokenize` and `/detokenize` (vLLM reference §1.1)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, model_validator

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import chat_prompt, fields, messages_in, models, prompts

paths: Sequence[str] = ("/tokenize", "/detokenize")


class TokenizeCompletionRequest(fields.OpenModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(fields.OpenModel):
    model: str | None = None
    messages: messages_in.MessageList
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[messages_in.ChatCompletionToolsParam] | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise WireError("`continue_final_message` and `add_generation_prompt` cannot both be True")
        return data


class DetokenizeRequest(fields.OpenModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=fields.INT64_MAX)]]


TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest
_REQUEST: TypeAdapter[TokenizeRequest] = TypeAdapter(TokenizeRequest)


def tokenize(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """The answer to `/tokenize`. Raises WireError."""
    request = http.validated(_REQUEST.validate_python, http.read_json(body, headers))
    models.resolve(request.model, env)
    text, special = _text(request, env)
    prompts.check_encodable(text)
    tokens = env.tokenizer.encode(text, add_special_tokens=special)
    strings = [env.tokenizer.token_string(token) for token in tokens] if request.return_token_strs else None
    return http.dumps({"count": len(tokens), "max_model_len": env.max_model_len, "tokens": tokens, "token_strs": strings})


def _text(request: TokenizeRequest, env: ServerEnv) -> tuple[str, bool]:
    if isinstance(request, TokenizeCompletionRequest):
        return request.prompt, request.add_special_tokens
    chat_prompt.check_trust(request, env)
    _conversation, text = chat_prompt.render_text(request.messages, request, env)
    return text, request.add_special_tokens


def detokenize(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """The answer to `/detokenize`: special tokens are shown. Raises WireError."""
    request = http.read_model(DetokenizeRequest, body, headers)
    models.resolve(request.model, env)
    prompts.check_vocabulary(request.tokens, env)
    return http.dumps({"prompt": env.tokenizer.decode(request.tokens, skip_special_tokens=False)})
