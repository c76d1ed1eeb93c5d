"""Field types that the completions and chat request models share, and the checks made before their fields are read.

Field order and union order are vLLM's: they decide the order of the validation lines. Checks that vLLM makes in a
"before" validator come before any field error; they raise WireError directly.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from windtunnel.wire.http import parameter_error

INT64_MAX = 2**63 - 1
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0)]
_TOKENS_AT_ONCE = 4096


def _long_token_ids(value: Any, validate: Callable[[Any], Any]) -> Any:
    """A long list of plain token ids is looked at in parts: one validation would hold every other thread for milliseconds."""
    if isinstance(value, list) and len(value) > _TOKENS_AT_ONCE and _are_token_ids(value):
        return value
    return validate(value)


def _are_token_ids(values: list[Any]) -> bool:
    for at in range(0, len(values), _TOKENS_AT_ONCE):
        part = values[at : at + _TOKENS_AT_ONCE]
        if set(map(type, part)) != {int} or min(part) < 0:
            return False
    return True


LongTokenIds = WrapValidator(_long_token_ids)
"""Beside a field's own type, which must accept a list of TokenId."""
StopList = Annotated[list[str], Field(max_length=4)]
Truncation = Annotated[int, Field(ge=-1, le=INT64_MAX)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
XargScalar = str | int | float
Xargs = dict[str, XargScalar | list[XargScalar]]
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]


class OpenModel(BaseModel):
    """Unknown members are accepted and ignored (vLLM reference §2.1)."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(OpenModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaResponseFormat(OpenModel):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaResponseFormat | None = None


class StructuralTagResponseFormat(OpenModel):
    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTag(OpenModel):
    begin: str
    tag_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    end: str


class LegacyStructuralTagResponseFormat(OpenModel):
    type: Literal["structural_tag"]
    structures: list[LegacyStructuralTag]
    triggers: list[str]


AnyResponseFormat = ResponseFormat | StructuralTagResponseFormat | LegacyStructuralTagResponseFormat


class StructuredOutputs(BaseModel):
    """`structured_outputs`: exactly one kind."""

    json_value: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class RepetitionDetection(BaseModel):
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


# Runs of fields that completions and chat share. A model's fields are in the order of its bases, the last one first.


class Sampled(OpenModel):
    """How the engine samples, and what of the prompt it keeps."""

    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    watermarking: bool | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None


class Answered(OpenModel):
    """The answer's form, its place in the queue, and what it tells."""

    structured_outputs: StructuredOutputs | None = None
    priority: Int64 = 0
    request_id: str | None = None
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: AtLeastZero = 0
    return_token_offsets: bool | None = False


class PassedOn(OpenModel):
    """Media, cache and transfer: handed to the engine as they are."""

    mm_payload: Literal["tensors", "none"] = "tensors"
    return_mm_kwargs: bool | None = None
    cache_salt: CacheSalt | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: Xargs | None = None
    repetition_detection: RepetitionDetection | None = None


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def check_stream_options(data: Mapping[str, Any]) -> None:
    options = data.get("stream_options")
    if not options:
        return
    if not data.get("stream"):
        raise parameter_error("`stream_options` may only be given together with `stream=True`", "stream_options")
    if isinstance(options, Mapping) and options.get("continuous_usage_stats") and not options.get("include_usage"):
        raise parameter_error("`continuous_usage_stats` needs `include_usage`", "stream_options")


def check_response_format(data: Mapping[str, Any]) -> None:
    wanted = data.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise parameter_error("A response_format of type 'json_schema' needs its 'json_schema' field", "response_format")


def check_structured_outputs(data: Mapping[str, Any]) -> None:
    wanted = data.get("structured_outputs")
    if not isinstance(wanted, Mapping):
        return
    given = [kind for kind in KINDS if wanted.get(kind) is not None]
    if len(given) > 1:
        raise parameter_error(f"`structured_outputs` takes one kind only, got {', '.join(given)}", "structured_outputs")


def check_prompt_logprobs(data: Mapping[str, Any]) -> None:
    wanted = data.get("prompt_logprobs")
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        return
    if data.get("stream") and (wanted > 0 or wanted == -1):
        raise parameter_error("`prompt_logprobs` cannot be given together with `stream=True`", "prompt_logprobs")
    if wanted < 0 and wanted != -1:
        raise parameter_error("`prompt_logprobs` must be a positive value or -1", "prompt_logprobs", wanted)


def check_cache_salt(data: Mapping[str, Any]) -> None:
    salt = data.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise parameter_error("`cache_salt` must be a non-empty string", "cache_salt")
