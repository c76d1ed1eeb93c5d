"""Page hashes of SGLang's KV events (reference §8.2)."""

from collections.abc import Sequence
from hashlib import sha256
from struct import pack

from windtunnel.core.request import EngineRequest

Namespace = tuple[str, str, str]
"""(adapter, extra key, cache salt): equal tokens in different namespaces never share pages. Empty strings: none."""

ROOT: Namespace = ("", "", "")


def namespace_of(request: EngineRequest) -> Namespace:
    return (request.lora.name if request.lora else "", request.extra_key or "", request.cache_salt or "")


def page_digest(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the previous page's digest, if any, and every token id as four little-endian bytes."""
    return sha256((parent or b"") + pack(f"<{len(token_ids)}I", *token_ids)).digest()


def seed_of(namespace: Namespace) -> bytes | None:
    """What stands in for a parent before the first page: None in the root namespace."""
    if namespace == ROOT:
        return None
    return sha256("\x1f".join(namespace).encode("utf-8", "surrogatepass")).digest()


def page_digests(parent: bytes | None, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Digests of the whole pages in `token_ids`, chained from `parent`."""
    digests: list[bytes] = []
    for at in range(0, len(token_ids) - page_size + 1, page_size):
        parent = page_digest(parent, token_ids[at : at + page_size])
        digests.append(parent)
    return digests


def wire_hash(digest: bytes) -> int:
    """The value in an event: the first 16 hex digits, read as a signed 64-bit integer."""
    return int.from_bytes(digest[:8], "big", signed=True)
