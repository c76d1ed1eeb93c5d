"""What a P/D router adds to a request: bootstrap host, port and room, one of each for every item of a batch.

The rules of SGLang's `mini_lb` (reference §2.3, §2.4).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ROOM_LIMIT = 1 << 63
_BATCHED = ("text", "input_ids", "prompt")


class PrefillAddress(NamedTuple):
    """One prefill worker as a router knows it."""

    url: str
    host: str
    bootstrap_port: int | None


def batch_size(body: Mapping[str, Any]) -> int | None:
    """How many prompts a body carries; None for one that is no batch. A list of numbers is one prompt."""
    for name in _BATCHED:
        prompts = body.get(name)
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            return len(prompts)
    return None


def with_bootstrap(body: Mapping[str, Any], prefill: PrefillAddress, draw: Callable[[int], int]) -> dict[str, Any]:
    """The body of both legs. `draw(n)` gives a number below n; room 0 means "no peer", so it is never given."""
    size = batch_size(body)
    rooms = [1 + draw(ROOM_LIMIT - 1) for _ in range(size or 1)]
    if size is None:
        told: dict[str, Any] = {
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": rooms[0],
        }
    else:
        told = {
            "bootstrap_host": [prefill.host] * size,
            "bootstrap_port": [prefill.bootstrap_port] * size,
            "bootstrap_room": rooms,
        }
    return {**body, **told}
