"""`/v1/chat/completions/batch`: a list of conversations, one answer each; no streams, tools or beams (vLLM reference §1.2)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, WireError
from windtunnel.wire.vllm import chat, chat_prompt, fields, messages_in, models, sampling, structured
from windtunnel.wire.vllm.completions import Routing, check_cache_salt
from windtunnel.wire.vllm.fields import Int64, StopList

name = "chat_batch"
paths: Sequence[str] = ("/v1/chat/completions/batch",)

body = chat.body
encoder = chat.encoder
error_body = chat.error_body

Conversation = Annotated[list[messages_in.ChatMessage], Field(min_length=1)]


class BatchChatCompletionRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model."""

    messages: Annotated[list[Conversation], Field(min_length=1)]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    logprob_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    response_format: Any = None
    seed: Int64 | None = None
    stop: str | StopList | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    tool_choice: Literal["none"] | None = "none"
    include_reasoning: bool = True
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    watermarking: bool | None = None
    length_penalty: float | None = 1.0
    early_stopping: bool = False
    structured_outputs: fields.StructuredOutputs | None = None
    request_id: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    include_stop_str_in_output: bool = False
    guided_decoding_backend: str | None = None
    echo: bool = False
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool = False

    @property
    def plain(self) -> "_Defaults":
        return _Defaults(self)

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for member in ("stream", "tools", "use_beam_search"):
                if data.get(member):
                    raise http.parameter_error(f"`{member}` is not possible in a batch of conversations", member)
            if data.get("n") not in (None, 1):
                raise http.parameter_error("`n` must be 1 in a batch of conversations", "n", data["n"])
        return data


class _Defaults:
    """A batch request with the members that only single requests have, at their defaults."""

    stop_token_ids: Sequence[int] = ()
    ignore_eos = False
    min_tokens = 0
    skip_special_tokens = True
    allowed_token_ids = None
    thinking_token_budget = None
    prompt_logprobs = None
    session_id = None

    def __init__(self, request: BatchChatCompletionRequest) -> None:
        self._request = request

    def __getattr__(self, member: str) -> Any:
        return getattr(self._request, member)


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate, render and tokenise every conversation. Raises WireError."""
    request = http.read_model(BatchChatCompletionRequest, body, headers)
    model, lora = models.resolve(request.model, env)
    chat_prompt.check_trust(request, env)
    sampling.check_logit_bias_keys(request.logit_bias)
    check_cache_salt(request.cache_salt, env)
    rendered = [chat_prompt.render(conversation, request, env) for conversation in request.messages]
    planned = tuple(prompt for _messages, prompt in rendered)
    longest = max(len(prompt.token_ids) for prompt in planned)
    sampled = chat.chat_sampling(request.plain, env, longest)
    sampling.check_ranges(sampled, env)
    routing = Routing.read(request.plain, headers, env)
    spec = chat.make_spec(request, env, planned, sampled, model, routing.id_base, rendered[0][0], None, bare_usage=True)
    answer = structured.wanted_answer(_response_format(request), request.structured_outputs, planned, env)
    return Generation(
        family=name,
        indexed_ids=True,
        spec=spec,
        response_id=spec.response_id,
        model=model,
        prompts=planned,
        sampling=sampling.plan(sampled, env),
        stream=False,
        priority=routing.priority,
        lora=lora,
        cache_salt=request.cache_salt,
        data_parallel_rank=routing.rank,
        late_error=sampling.late_error(sampled, [prompt.token_ids for prompt in planned], env) or answer.late_error,
        answer_text=answer.text,
    )


def _response_format(request: BatchChatCompletionRequest) -> fields.ResponseFormat | None:
    if request.response_format is None:
        return None
    try:
        return fields.ResponseFormat.model_validate(request.response_format)
    except ValueError:
        raise WireError("`response_format` must have a type of 'text', 'json_object' or 'json_schema'") from None
