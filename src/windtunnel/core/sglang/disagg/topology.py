"""What a decode worker knows of a prefill (SGLang reference §2.2, §2.5)."""

from collections.abc import Mapping
from typing import NamedTuple


class Topology(NamedTuple):
    """The bootstrap server's answer, with the endpoints of all ranks."""

    tp_size: int
    dp_size: int
    endpoints: Mapping[tuple[int, int], str]
    """(DP rank, TP rank) → ip:port of the rank's socket."""
    follow_bootstrap_room: bool = True


class Targets(NamedTuple):
    """The prefill ranks that one decode rank deals with, for one room."""

    endpoints: tuple[str, ...]
    ranks: tuple[int, ...]
    required_dst_info_num: int
    """How many decode ranks each of them serves."""


def targets_of(topology: Topology, dp_rank: int, decode_rank: int, decode_tp_size: int) -> Targets:
    """Equal sizes pair up; a larger side shares, a smaller one gathers. Raises ValueError if neither divides the other."""
    prefill, decode = topology.tp_size, decode_tp_size
    if max(prefill, decode) % min(prefill, decode):
        raise ValueError(f"attn_tp_size is {prefill} on the prefill and {decode} here: one must divide the other")
    if decode >= prefill:
        ranks: tuple[int, ...] = (decode_rank * prefill // decode,)
    else:
        share = prefill // decode
        ranks = tuple(range(decode_rank * share, (decode_rank + 1) * share))
    endpoints = tuple(topology.endpoints[dp_rank, rank] for rank in ranks)
    return Targets(endpoints, ranks, max(1, decode // prefill))
