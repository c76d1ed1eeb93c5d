"""What an engine is asked for: frozen values, made by a front end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

UNTIL_RELEASED = 1 << 62
"""`EngineRequest.deferred_until_ns` of a request that a front end still holds: it waits for `Engine.release`."""


class TokenSource(Protocol):
    """What one sequence "generates". A pure function of position, so a preempted sequence continues unchanged."""

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        """Output tokens start … start + count - 1. Fewer than asked: the text ends there and the engine adds EOS.

        Whoever makes the source honours `ignore_eos` (never ends) and `min_tokens` (does not end before).
        """
        ...


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter, as the KV hash and the LoRA slots know it."""

    name: str
    path: str
    lora_id: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a sound or a film that stands among the prompt's tokens; equal identifiers are equal contents."""

    identifier: str
    offset: int
    """The first of its placeholder tokens."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """Stop when the output ends in `count` copies of one pattern of `shortest` to `longest` tokens (`repetition_detection`)."""

    shortest: int
    longest: int
    count: int

    def ends(self, tokens: Sequence[int]) -> bool:
        made = len(tokens)
        longest = min(self.longest, made // self.count)
        return any(self._repeats(tokens, size) for size in range(self.shortest, longest + 1) if tokens[-1] == tokens[-1 - size])

    def _repeats(self, tokens: Sequence[int], size: int) -> bool:
        """All but the first copy equal what stands one pattern before."""
        first = len(tokens) - size * self.count
        return tokens[first + size :] == tokens[first:-size]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence. A prompt with `n > 1` is `n` of these, submitted together."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    source: TokenSource
    max_tokens: int
    arrival_ns: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    repetition: Repetition | None = None
    """vLLM only."""
    priority: int = 0
    lora: Lora | None = None
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()
    """By offset. vLLM only."""
    parent_id: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    deferred_until_ns: int = 0
    """Not schedulable before this time (grammar compilation); the request counts as deferred. See also `UNTIL_RELEASED`."""
    prompt_hashes: Sequence[bytes] = ()
    """Hashes of the prompt's full blocks, made beforehand (`BlockHasher.in_parts`) so that a long prompt stalls nobody.

    Empty or too few: the engine makes the rest when it looks the prompt up.
    """
    prompt_blocks: Sequence[int] = ()
    """What `VllmEngine.foresee` found of them in the cache: a hint that is checked. vLLM only."""
    report_cached_blocks: bool = False
    """Publish BlockStored for prefix hits too (`vllm_xargs.kv_cache_report_mode = full`)."""
    kv_transfer: Mapping[str, Any] | None = None
    bootstrap: tuple[str, int | None, int] | None = None
    """SGLang P/D: (host, port, room)."""
    extra_key: str | None = None
    """SGLang: a further part of the radix cache's namespace."""
    routing_key: str | None = None
    """SGLang: what `--schedule-policy routing-key` groups by (header `x-smg-routing-key`)."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Plain values for `/debug/requests` (family, route); no engine reads them."""

    def stops(self, eos_token_id: int | None, extra_eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end its output, on an engine with these ends of a text."""
        if self.ignore_eos:
            return self.stop_token_ids
        ends = extra_eos_token_ids if eos_token_id is None else extra_eos_token_ids | {eos_token_id}
        return self.stop_token_ids | ends
