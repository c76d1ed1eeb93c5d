"""What the bootstrap server and its callers say: registration, topology and rank answers (SGLang reference §2.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RouteRegistration(BaseModel):
    """`PUT /route`: one prefill rank says where it is and how it is laid out. Further keys of real ranks are accepted."""

    model_config = ConfigDict(extra="allow", frozen=True)

    attn_tp_size: int = Field(ge=1, le=1024)
    attn_tp_rank: int = Field(ge=0)
    attn_cp_size: int = Field(1, ge=1, le=1024)
    attn_cp_rank: int = Field(0, ge=0)
    attn_dp_size: int = Field(1, ge=1, le=1024)
    attn_dp_rank: int = Field(0, ge=0)
    pp_size: int = Field(1, ge=1, le=1024)
    pp_rank: int = Field(0, ge=0)
    system_dp_size: int = Field(1, ge=1)
    system_dp_rank: int = Field(0, ge=0)
    rank_ip: str = Field(min_length=1, max_length=256)
    rank_port: int = Field(ge=1, le=65535)
    page_size: int = Field(ge=1)
    kv_cache_dtype: str = "auto"
    kv_layout: str | None = None
    load_balance_method: str = "follow_bootstrap_room"
    prefill_http_port: int | None = None
    decode_allocation_policy: str = "eager"

    @property
    def place(self) -> "Place":
        return Place(self.attn_dp_rank, self.attn_cp_rank, self.attn_tp_rank, self.pp_rank)

    @property
    def layout(self) -> Mapping[str, Any]:
        """What must be the same for all ranks of a prefill."""
        return {name: getattr(self, name) for name in _LAYOUT}

    @property
    def ranks(self) -> int:
        return self.attn_dp_size * self.attn_cp_size * self.attn_tp_size * self.pp_size


_LAYOUT = (
    "attn_tp_size",
    "attn_cp_size",
    "attn_dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "load_balance_method",
    "decode_allocation_policy",
)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One rank of a prefill."""

    dp: int
    cp: int
    tp: int
    pp: int


class DpRankRegistration(BaseModel):
    """`POST /register_dp_rank`."""

    bootstrap_room: int
    dp_rank: int = Field(ge=0)


class DpRankQueryBody(BaseModel):
    """`POST /query_dp_ranks`."""

    bootstrap_rooms: list[int] = Field(max_length=65536)


def topology_answer(one: RouteRegistration) -> dict[str, Any]:
    """`GET /route` with -1 everywhere; any rank of the prefill describes it."""
    return {
        "attn_tp_size": one.attn_tp_size,
        "attn_cp_size": one.attn_cp_size,
        "dp_size": one.attn_dp_size,
        "pp_size": one.pp_size,
        "page_size": one.page_size,
        "kv_cache_dtype": one.kv_cache_dtype,
        "follow_bootstrap_room": one.load_balance_method == "follow_bootstrap_room",
        "enable_cp_cache_sharding": False,
        "enable_dcp_cache_sharding": False,
        "prefill_http_port": one.prefill_http_port,
        "decode_allocation_policy": one.decode_allocation_policy,
        "target_tp_rank": None,
        "target_tp_ranks": None,
        "target_cp_ranks": None,
        "target_pp_ranks": None,
        "required_dst_info_num": None,
        "required_prefill_response_num": None,
    }


class TopologyAnswer(BaseModel):
    """What a decode reads of a topology."""

    attn_tp_size: int = Field(ge=1, le=1024)
    dp_size: int = Field(ge=1, le=1024)
    page_size: int | None = None
    follow_bootstrap_room: bool = True


class RankAnswer(BaseModel):
    """What a decode reads of one rank."""

    rank_ip: str
    rank_port: int = Field(ge=1, le=65535)
