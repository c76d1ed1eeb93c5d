"""Releases of SGLang as groups of switches (SGLang reference §11.2), each switch with its history and its source.

A switch keeps its value from the release that set it until the next one named. The NIXL back end is described. Releases in
brackets are known only to lie between two that were compared; the later one is named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

OLDEST, NEWEST = "0.4.10", "0.5.23"


def _switch(source: str, **since: Any) -> Any:
    """A field whose values come from the history `since` (`v0_5_12=True`: from 0.5.12 on)."""
    history = tuple((_key(name[1:].replace("_", ".")), value) for name, value in since.items())
    return field(metadata={"source": source, "history": history})


def _key(version: str) -> tuple[int, ...]:
    parts = version.split(".post")[0].split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"sglang-profile is {version!r}: write a release such as 0.5.15 ({OLDEST} … {NEWEST})")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one release behaves. Make it with `profile(version)`; tests and fault arms use `dataclasses.replace`."""

    version: str
    status_rule: str = _switch(
        "§1.3",
        v0_4_10="max",
        v0_5_6="failset",
        v0_5_12="nores",
        v0_5_16="nixl-sticky",
        v0_5_20="terminal-failed",
    )
    missing_room: str = _switch(
        "§1.4; the common reading is known of 0.5.23", v0_4_10="raise", v0_5_12="waiting", v0_5_20="failed"
    )
    async_worker: bool = _switch("§1.6: before, `send` posts and `poll` looks at the handles", v0_4_10=False, v0_5_12=True)
    sender_abort_fails: bool = _switch(
        "§1.6, #24522: before, an abort of a NIXL sender has no effect", v0_4_10=False, v0_5_12=True
    )
    sender_latch: bool = _switch("§1.6: the NIXL poll reads `conclude_state`", v0_4_10=False, v0_5_22=True)
    bootstrap_timeout: bool = _switch("§3.3, #34692 (P29)", v0_4_10=False, v0_5_18=True)
    waiting_queue_polled: bool = _switch("§3.1 (P13)", v0_4_10=False, v0_5_14=True)
    waiting_abort_frees_slot: bool = _switch("P14, #17483 (bracketed by number)", v0_4_10=False, v0_5_10=True)
    abort_clears_room: bool = _switch("§1.6 ending 4, §1.3 (e)", v0_4_10=False, v0_5_20=True)
    inflight_bootstrapping_fatal: bool = _switch("§3.1, #31075 (bracketed by number)", v0_4_10=False, v0_5_17=True)
    decode_sends_abort: bool = _switch("§5, #27372", v0_4_10=False, v0_5_13=True)
    prefill_on_abort: str = _switch(
        "§1.6, §4.1: `dies` ends the receive thread (P1)", v0_4_10="ignore", v0_5_13="dies", v0_5_16="fail", v0_5_20="ack"
    )
    ack_survives_clear: bool = _switch("P31, #38961 open", v0_4_10=False)
    deferred_release: bool = _switch("§3.3: off by default in 0.5.20, absent before", v0_4_10=False, v0_5_21=True)
    failure_notice: bool = _switch("§4.1, #36612 (P7)", v0_4_10=False, v0_5_20=True)
    success_notice: bool = _switch("§4.1: before, completion travels as NIXL notifications", v0_4_10=False, v0_5_23=True)
    conclude_checks: bool = _switch("§1.5: `conclude_transfer` re-reads the table", v0_4_10=False, v0_5_20=True)
    success_honours_abort: bool = _switch("P5, #33507 open", v0_4_10=False)
    drain_before_timeout: bool = _switch("P24, #32267", v0_4_10=False, v0_5_17=True)
    ready_handshakes_polled: bool = _switch("P11, #25561", v0_4_10=False, v0_5_13=True)
    rank_cache_dropped: bool = _switch("P36, #36029", v0_4_10=False, v0_5_20=True)
    topology_tries: int | None = _switch("P34, #20785 (bracketed by number); None: no limit", v0_4_10=None, v0_5_12=15)
    zmq_send_timeout: bool = _switch("P32, #31144", v0_4_10=False, v0_5_16=True)
    metadata_room_check: bool = _switch("P17, §3.2 (0.5.23; older releases not dated)", v0_4_10=True)
    running_gauge_of_batch: bool = _switch("§6.1, #31495", v0_4_10=False, v0_5_16=True)
    bootstrap_gauge: str = _switch(
        "§6.2 (renamed in 0.5.10 or 0.5.11)",
        v0_4_10="num_prefill_prealloc_queue_reqs",
        v0_5_11="num_prefill_bootstrap_queue_reqs",
    )
    inflight_gauge: str = _switch(
        "§6.2 (0.4.x misspells it)", v0_4_10="num_prefill_infight_queue_reqs", v0_5_0="num_prefill_inflight_queue_reqs"
    )
    transfer_speed_is_histogram: bool = _switch("§6.2", v0_4_10=False, v0_5_10=True)
    kv_events_as_maps: bool = _switch("§8.2", v0_4_10=False, v0_5_20=True)
    kv_events_coalesced: bool = _switch("§8.2 (not dated; set with the maps)", v0_4_10=False, v0_5_20=True)
    disconnect_loses_state: bool = _switch("§5 (P41)", v0_4_10=False, v0_5_17=True, v0_5_20=False)
    tombstones: bool = _switch("ours: late metadata of an ended room is refused; no release does so (§1.6, end)", v0_4_10=False)


def profile(version: str = NEWEST) -> Profile:
    """The switches of one release. Raises ValueError for one that is not described."""
    wanted = _key(version)
    if not _key(OLDEST) <= wanted <= _key(NEWEST):
        raise ValueError(f"sglang-profile is {version!r}: must lie between {OLDEST} and {NEWEST}")
    values: dict[str, Any] = {"version": version}
    for switch in fields(Profile):
        if switch.metadata:
            values[switch.name] = [value for since, value in switch.metadata["history"] if since <= wanted][-1]
    return Profile(**values)


SOURCES: Mapping[str, str] = MappingProxyType({item.name: item.metadata["source"] for item in fields(Profile) if item.metadata})
"""Where each switch is described (sections and numbers of the SGLang reference)."""
