"""What a server says about itself, for the record and for servers without metrics.

Facts: `owned_by` of `/v1/models` is `vllm` (vLLM reference §1), `sglang` (SGLang reference §7) or `llamacpp` (llama-server's
README); `/version` is vLLM's; only simulated servers of ours have `/debug/requests`.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.lab.connection import ConnectionCut, MalformedResponse, fetch
from windtunnel.lab.target import Target

PATIENCE_S = 2.0
TEXT_LIMIT = 80
OWNERS: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
"""`owned_by` → engine kind, where there are no metrics to recognise it by."""


async def server_info(target: Target) -> dict[str, str]:
    """`owned_by`, `version` and `product`, as far as the target has them."""
    cards, version, live = await asyncio.gather(*(_get(target, path) for path in ("/v1/models", "/version", "/debug/requests")))
    owner, number = _owner(cards, target.model), version.get("version")
    out = {
        "owned_by": owner,
        "version": number,
        "product": "windtunnel" if isinstance(live.get("live"), list) else OWNERS.get(owner or ""),
    }
    return {key: str(value)[:TEXT_LIMIT] for key, value in out.items() if value}


def _owner(cards: Mapping[str, Any], model: str) -> str | None:
    """Of the model's card, or else of the first."""
    listed = [card for card in cards.get("data") or () if isinstance(card, dict)]
    own = [card for card in listed if card.get("id") == model] or listed
    return own[0].get("owned_by") if own else None


async def _get(target: Target, path: str) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none."""
    origin = target.plain
    root = replace(origin, prefix=origin.prefix.removesuffix("/v1"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await fetch(root, "GET", path, target.headers)
        found = json.loads(answer.body) if answer.status == 200 else {}
    except (OSError, ConnectionCut, MalformedResponse, TimeoutError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
