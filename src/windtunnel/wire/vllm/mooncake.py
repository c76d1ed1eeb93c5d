"""What engines with the Mooncake connector tell one another, as bytes.

Names and shapes of `MooncakeXferMetadata`, `MooncakeXferResponse`, the registration and the answer of `GET /query` are those of
vLLM 0.33.0 (`mooncake_connector.py`, `mooncake_utils.py`). Ours are `windtunnel_engine_id` in a pull and `windtunnel_digests`
in an answer: no memory lies behind the addresses, so a prefill refuses a pull that has not the first of them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, Field

from windtunnel.core.vllm.connector.mooncake.pulls import MAX_PULLS
from windtunnel.core.vllm.connector.params import HOST_LIMIT_BYTES, ID_LIMIT_BYTES, MAX_BLOCK, MAX_BLOCKS, MAX_RANKS, is_text
from windtunnel.core.vllm.connector.seam import Peer, Pull, Pulled, Pulls

BYTES_LIMIT = 16 * 1024 * 1024
MAX_BLOCK_BYTES = 1 << 40
_REASON_LIMIT = 500
FINISH, CONTINUE, ERROR, LAYOUT_MISS = range(4)
"""`MooncakeXferResponseStatus`."""

Shape = TypeVar("Shape")


class MooncakeError(ValueError):
    """Bytes that are not what is due."""


class XferMetadata(msgspec.Struct, omit_defaults=True):
    """A pull. All ranks and layers are one region here, whose blocks have so many bytes; nothing is written to addresses."""

    remote_hostname: str
    remote_port: int
    remote_tp_size: int
    remote_tp_rank: int
    req_blocks: dict[str, tuple[str, list[list[int]]]]
    kv_caches_base_addr: list[int]
    block_lens: list[int]
    kv_block_lens: list[int]
    windtunnel_engine_id: str = ""


class XferResponse(msgspec.Struct, omit_defaults=True):
    """An answer to a pull; more follow while its status is CONTINUE."""

    status: int
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None
    err_msg: str | None = None
    windtunnel_digests: dict[str, str] | None = None


def encode_pulls(pulls: Pulls) -> bytes:
    decode = pulls.decode
    metadata = XferMetadata(
        remote_hostname=decode.host,
        remote_port=decode.port,
        remote_tp_size=decode.tp_size,
        remote_tp_rank=0,
        req_blocks={one.request_id: (one.transfer_id, [list(one.blocks)] if one.blocks else []) for one in pulls.pulls},
        kv_caches_base_addr=[],
        block_lens=[pulls.block_bytes],
        kv_block_lens=[pulls.block_bytes],
        windtunnel_engine_id=decode.engine_id,
    )
    return msgspec.msgpack.encode(metadata)


def decode_pulls(data: bytes) -> Pulls:
    """Raises MooncakeError."""
    told = _decode(data, XferMetadata, "a pull")
    if not told.windtunnel_engine_id:
        raise MooncakeError("a pull of an engine with real memory: a simulator has nothing to write there")
    if not is_text(told.windtunnel_engine_id, ID_LIMIT_BYTES) or not is_text(told.remote_hostname, HOST_LIMIT_BYTES):
        raise MooncakeError("a pull: the engine's id or its host is too long, or no text")
    if not (0 < told.remote_port < 65536 and 1 <= told.remote_tp_size <= MAX_RANKS):
        raise MooncakeError(f"a pull: port {told.remote_port} or tensor-parallel size {told.remote_tp_size} is out of range")
    if not 0 < len(told.req_blocks) <= MAX_PULLS:
        raise MooncakeError(f"a pull of {len(told.req_blocks)} requests: must be 1 to {MAX_PULLS}")
    decode = Peer(told.windtunnel_engine_id, told.remote_hostname, told.remote_port, told.remote_tp_size)
    if len(told.kv_block_lens) != 1 or not 0 < told.kv_block_lens[0] <= MAX_BLOCK_BYTES:
        raise MooncakeError(f"a pull: kv_block_lens must have the bytes of a block, 1 to {MAX_BLOCK_BYTES}")
    return Pulls(decode, tuple(_pull(request_id, *one) for request_id, one in told.req_blocks.items()), told.kv_block_lens[0])


def _pull(request_id: str, transfer_id: str, groups: Sequence[Sequence[int]]) -> Pull:
    if not is_text(request_id, ID_LIMIT_BYTES) or not is_text(transfer_id, ID_LIMIT_BYTES):
        raise MooncakeError(f"a pull: an id is empty, no text, or has over {ID_LIMIT_BYTES} bytes")
    if len(groups) > 1:
        raise MooncakeError(f"KV group count mismatch: local=1, remote={len(groups)}")
    blocks = tuple(groups[0]) if groups else ()
    if len(blocks) > MAX_BLOCKS or not all(0 <= block <= MAX_BLOCK for block in blocks):
        raise MooncakeError(f"a pull: at most {MAX_BLOCKS} block ids from 0 to {MAX_BLOCK}")
    return Pull(request_id, transfer_id, blocks)


def encode_answer(answer: Pulled) -> bytes:
    status, ids = FINISH if answer.last else CONTINUE, [answer.request_id]
    if answer.reason is not None:
        return msgspec.msgpack.encode(XferResponse(status, err_reqs=ids, err_msg=answer.reason))
    return msgspec.msgpack.encode(XferResponse(status, ok_reqs=ids, windtunnel_digests={answer.request_id: answer.digest}))


def encode_error(reason: str) -> bytes:
    """To a pull that cannot be served at all."""
    return msgspec.msgpack.encode(XferResponse(ERROR, err_msg=reason[:_REASON_LIMIT]))


class Answers(NamedTuple):
    """What one message says."""

    pulled: tuple[Pulled, ...]
    error: str | None = None
    """The whole pull has failed."""


def decode_answers(data: bytes) -> Answers:
    """Raises MooncakeError."""
    told = _decode(data, XferResponse, "an answer to a pull")
    reason = (told.err_msg or "unknown error")[:_REASON_LIMIT]
    if told.status not in (FINISH, CONTINUE):
        return Answers((), reason)
    last, digests = told.status == FINISH, told.windtunnel_digests or {}
    good = [Pulled(one, None, digests.get(one, ""), last) for one in told.ok_reqs or ()]
    return Answers((*good, *(Pulled(one, reason, last=last) for one in told.err_reqs or ())))


def _decode(data: bytes, shape: type[Shape], what: str) -> Shape:
    if len(data) > BYTES_LIMIT:
        raise MooncakeError(f"{what} of {len(data)} bytes: at most {BYTES_LIMIT} are read")
    try:
        return msgspec.msgpack.decode(data, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MooncakeError(f"not {what}: {error}") from None


# The bootstrap server


class Registration(BaseModel):
    """`POST /register`, vLLM's `RegisterWorkerPayload`."""

    engine_id: str = Field(max_length=ID_LIMIT_BYTES)
    dp_rank: int
    tp_rank: int
    pp_rank: int
    addr: str = Field(max_length=HOST_LIMIT_BYTES)


class EngineEntry(NamedTuple):
    """One data-parallel rank: its workers by tensor-parallel and pipeline rank."""

    engine_id: str
    worker_addr: Mapping[int, Mapping[int, str]]


def query_answer(entries: Mapping[int, EngineEntry]) -> bytes:
    """`GET /query`."""
    return _json({str(rank): entry._asdict() for rank, entry in entries.items()})


class _Entry(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


def worker_addresses(body: bytes) -> dict[str, str]:
    """What `GET /query` says: of each engine id the address (host:port) of its first worker. Raises MooncakeError."""
    found = {entry.engine_id: entry.worker_addr.get("0", {}).get("0", "") for entry in _entries(body).values()}
    return {engine_id: address.removeprefix("tcp://") for engine_id, address in found.items() if address.startswith("tcp://")}


def engine_ids(body: bytes) -> dict[int, str]:
    """The same: of each data-parallel rank its engine id, from one to `MAX_RANKS` of them. Raises MooncakeError."""
    ids = {int(rank): entry.engine_id for rank, entry in _entries(body).items() if re.fullmatch("[0-9]{1,9}", rank)}
    if not 0 < len(ids) <= MAX_RANKS:
        raise MooncakeError(f"{len(ids)} engines are registered: must be 1 to {MAX_RANKS}")
    return ids


def _entries(body: bytes) -> dict[str, _Entry]:
    try:
        return msgspec.json.decode(body, type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MooncakeError(f"not an answer of /query: {error}") from None


def error_detail(detail: Any) -> bytes:
    """As FastAPI, which serves vLLM's bootstrap server, writes its errors."""
    return _json({"detail": detail})


def _json(told: Any) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()
