"""Everything that a family needs to know about the server it speaks for: one frozen value, made once at start.

A change at run time (an adapter loaded) makes a new value with `dataclasses.replace`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

from windtunnel.core.request import Lora
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.wire.vllm.versions import LATEST, Profile, profile


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its JSON value, and the conversation that led to it (without instructions)."""

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]


class ResponseStore(Protocol):
    """Where responses are kept by id. Owned by the server."""

    def get(self, response_id: str) -> Stored | None: ...

    def put(self, response_id: str, stored: Stored) -> None: ...


def counting_ids() -> Callable[[], str]:
    """Ids for tests: 16 hex digits that count up."""
    counter = itertools.count(1)
    return lambda: f"{next(counter):016x}"


@dataclass(frozen=True, slots=True)
class ServerEnv:
    """The server as its API families see it. `new_id` gives 16 hex digits, `now_s` Unix seconds."""

    served_models: tuple[str, ...]
    """The first one is what answers say; the others are aliases."""
    tokenizer: Tokenizer
    max_model_len: int
    new_id: Callable[[], str]
    now_s: Callable[[], int]
    root: str = ""
    """The model path; the first served name when empty."""
    loras: Mapping[str, Lora] = field(default_factory=dict)
    version: str = LATEST
    vocab_size: int = 0
    """The model's; the tokenizer's when 0."""
    extra_eos_token_ids: tuple[int, ...] = ()
    """EOS ids of the generation config besides the tokenizer's own; they end an answer with `stop_reason` set."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling defaults of the generation config (`temperature`, `top_p`, `max_tokens`, …)."""
    data_parallel_size: int = 1
    stream_interval: int = 1
    max_logprobs: int = 20
    max_stop_strings: int = 4
    max_n: int = 16384
    max_body_bytes: int = 64 * 1024 * 1024
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    enable_prompt_embeds: bool = False
    enable_scale_out: bool = False
    pooling_task: Literal["embed", "classify"] = "embed"
    """What a pooling model gives."""
    embedding_size: int = 384
    """Dimensions of a pooling model's vectors."""
    num_labels: int = 2
    """Classes of a classifying model."""
    return_tokens_as_token_ids: bool = False
    trust_request_chat_template: bool = False
    trust_request_mm_kwargs: bool = False
    media_tokens: int = 0
    """Placeholder tokens of each image, sound or film in a chat; 0: the model takes text only."""
    stored: ResponseStore | None = None
    """None: `store` is ignored (`VLLM_ENABLE_RESPONSES_API_STORE` is off)."""
    fingerprint: str = ""
    """8 hex digits, stable for one configuration; derived from the other fields when empty."""

    @property
    def model_root(self) -> str:
        return self.root or self.served_models[0]

    @property
    def vocabulary(self) -> int:
        return self.vocab_size or self.tokenizer.vocab_size

    @property
    def profile(self) -> Profile:
        return profile(self.version)

    @property
    def system_fingerprint(self) -> str:
        return f"vllm-{self.profile.version}-{self.fingerprint or _digest(self)}"

    @property
    def max_prompt_chars(self) -> int:
        """No text longer than this can be a prompt: the context times the longest vocabulary entry."""
        return self.max_model_len * longest_token_chars(self.tokenizer)


def _digest(env: ServerEnv) -> str:
    told = (env.served_models, env.root, env.max_model_len, env.version, env.tool_call_parser, env.reasoning_parser)
    flags = (env.enable_prompt_tokens_details, env.enable_force_include_usage, env.enable_per_request_metrics)
    return blake2b(repr((told, flags)).encode(), digest_size=4).hexdigest()


def longest_token_chars(tokenizer: Tokenizer) -> int:
    """The length of the longest vocabulary entry; kept per tokenizer object."""
    known = _LONGEST.get(id(tokenizer))
    if known is None or known[0] is not tokenizer:
        _LONGEST.clear()
        known = _LONGEST[id(tokenizer)] = (tokenizer, _longest(tokenizer))
    return known[1]


_LONGEST: dict[int, tuple[Tokenizer, int]] = {}


def _longest(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_string(token)) for token in range(tokenizer.vocab_size))
