"""The table of planted defects: plain data, so that listing them loads none of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    module: str
    summary: str
    seam: str
    """The seam that it attaches to (a field of `serve.seams.Seams`, or of the engine's)."""
    models: tuple[str, ...]
    """The public reports that it models."""
    finding: str
    """The finding that the lab must raise."""
    option: str = ""
    """What may follow the name after a colon (`NAME:VALUE`), with its default; empty: nothing."""
    experiment: str = ""
    """The built-in experiment that proves it, where one server is not enough; empty: tests, and `windtunnel selftest`."""
    pair: str = ""
    """The kind of P/D pair (a preset of `windtunnel up`) whose servers can have it; empty: any server."""


class UnknownFault(ValueError):
    """No defect of this name, or one that takes no value. The message says which there are."""


def find(text: str) -> "tuple[CatalogueEntry, str]":
    """The entry that `NAME` or `NAME:VALUE` means, and the value."""
    name, _, value = text.partition(":")
    entry = CATALOGUE.get(name)
    if entry is None:
        raise UnknownFault(f"{name!r} is not a fault; those are {', '.join(CATALOGUE)}")
    if value and not entry.option:
        raise UnknownFault(f"{name!r} takes no value")
    return entry, value


SGLANG_PD, VLLM_PD = "sglang-pd", "vllm-pd"

_ENTRIES = (
    CatalogueEntry(
        name="response-object-reuse",
        module="response_object_reuse",
        summary="responses come from a pool; a stream that outlives its handler reports a failed write into one of them",
        seam="wrap_app, write_failed",
        models=("cancelled-streams investigation",),
        finding="bystander_error",
    ),
    CatalogueEntry(
        name="deaf-to-disconnect",
        module="deaf_to_disconnect",
        summary="the request runs on after its client has gone",
        seam="disconnected",
        models=("vLLM #10087", "vLLM #54947"),
        finding="zombie_tokens",
    ),
    CatalogueEntry(
        name="late-abort",
        module="late_abort",
        summary="an abort takes effect only some time after the client has gone",
        seam="engine",
        models=("vLLM #27901", "vLLM #54947"),
        finding="late_cancel",
        option="delay, default 1s",
    ),
    CatalogueEntry(
        name="stale-gauges-after-abort",
        module="stale_gauges",
        summary="gauges stay where they were after everything has been cancelled, until the next request",
        seam="engine",
        models=("vLLM #22545", "vLLM #29928"),
        finding="stale_gauge",
    ),
    CatalogueEntry(
        name="head-of-line-wedge",
        module="head_of_line_wedge",
        summary="the KV pool holds half a context: a longer prompt waits for ever and blocks everyone behind it",
        seam="engine_config",
        models=("vLLM #39734", "vLLM #35541"),
        finding="wedged",
    ),
    CatalogueEntry(
        name="engine-freeze",
        module="engine_freeze",
        summary="the engine falls silent after so many steps while health stays green",
        seam="engine",
        models=("vLLM #39863",),
        finding="wedged",
        option="steps, default 20",
    ),
    CatalogueEntry(
        name="cut-stream",
        module="cut_stream",
        summary="every second stream is cut after a few frames, without terminator",
        seam="sink",
        models=("vLLM #22341",),
        finding="unterminated_stream",
        option="frames, default 3",
    ),
    CatalogueEntry(
        name="error-in-stream",
        module="error_in_stream",
        summary="every second request fails after its first tokens, inside the 200 when it streams",
        seam="engine",
        models=("sglang #21900", "LightLLM #1537"),
        finding="hidden_error",
    ),
    CatalogueEntry(
        name="empty-success",
        module="empty_success",
        summary="every second stream is its terminator and nothing else",
        seam="family",
        models=("vLLM #40978", "vLLM #41929"),
        finding="corrupt_stream",
    ),
    CatalogueEntry(
        name="lost-tokens",
        module="lost_tokens",
        summary="every second stream loses one frame",
        seam="family",
        models=("vLLM #40986",),
        finding="corrupt_stream",
    ),
    CatalogueEntry(
        name="engine-death",
        module="engine_death",
        summary="the engine core dies after so many steps; the server follows when its watchdog has seen it",
        seam="engine",
        models=("vLLM #43226", "vLLM #46240"),
        finding="wedged",
        option="steps, default 20",
    ),
    CatalogueEntry(
        name="slot-leak-on-abort",
        module="slot_leak_on_abort",
        summary="whoever is aborted stays in the running count with its blocks",
        seam="engine",
        models=("LiteLLM #27955", "vLLM #14326"),
        finding="slot_leak",
    ),
    CatalogueEntry(
        name="kv-leak-on-abort",
        module="kv_leak_on_abort",
        summary="the blocks of whoever is aborted are not freed",
        seam="engine",
        models=("vLLM #32255", "sglang #9817"),
        finding="kv_leak",
    ),
    CatalogueEntry(
        name="orphan-in-queue",
        module="orphan_in_queue",
        summary="whoever is aborted stays in the waiting count",
        seam="engine",
        models=("sglang #17483", "sglang #26912"),
        finding="queue_orphan",
    ),
    CatalogueEntry(
        name="counts-down-on-success-only",
        module="counts_down_on_success_only",
        summary="the running count goes down only for answers that end well",
        seam="engine",
        models=("production-stack #1001",),
        finding="gauge_drift",
    ),
    CatalogueEntry(
        name="counted-out-twice",
        module="counted_out_twice",
        summary="whoever is aborted is taken off the running count twice",
        seam="engine",
        models=("llm-d-router #1739", "GAIE #2847"),
        finding="gauge_drift",
    ),
    CatalogueEntry(
        name="written-into-others",
        module="written_into_others",
        summary="once somebody was aborted, every second request gets the words of the one before it",
        seam="engine",
        models=("vLLM #32255", "llm-d-router #1147"),
        finding="crossed_stream",
    ),
    CatalogueEntry(
        name="abort-by-prefix",
        module="abort_by_prefix",
        summary="an abort also ends everybody whose id begins alike",
        seam="engine",
        models=("sglang #25561",),
        finding="collateral_abort",
    ),
    CatalogueEntry(
        name="cancelled-as-finished",
        module="cancelled_as_finished",
        summary="whoever leaves is counted as served in full",
        seam="metrics",
        models=("LiteLLM #39748", "production-stack #1001"),
        finding="cancel_miscounted",
    ),
    CatalogueEntry(
        name="blocking-cleanup",
        module="blocking_cleanup",
        summary="cleaning up after a client that has left holds the event loop",
        seam="disconnected",
        models=("LiteLLM #36429",),
        finding="survivor_slowdown",
        option="time for each, default 120ms",
    ),
    CatalogueEntry(
        name="transfer-race",
        module="transfer_race",
        summary="P/D prefill: time between a transfer worker's check of a room and its update to Transferring",
        seam="disagg_config",
        models=("sglang #24522", "sglang #30352"),
        finding="hidden_cleanup",
        option="gap, default 1s",
        experiment="pd-abort-storm",
        pair=SGLANG_PD,
    ),
    CatalogueEntry(
        name="peer-lost-on-abort",
        module="peer_lost_on_abort",
        summary="P/D prefill: an aborted room's writes have lost their peer; the transport says so after its time",
        seam="disagg_config",
        models=("sglang #31800",),
        finding="hidden_cleanup",
        experiment="pd-abort-storm",
        pair=SGLANG_PD,
    ),
    CatalogueEntry(
        name="persistent-pin",
        module="persistent_pin",
        summary="P/D prefill: one request is inflight from the start, on a handle that never settles",
        seam="transfer_backend, connected",
        models=("sglang #31800", "sglang #37316"),
        finding="hidden_cleanup",
        experiment="pd-abort-storm",
        pair=SGLANG_PD,
    ),
    CatalogueEntry(
        name="load-into-freed-blocks",
        module="load_into_freed_blocks",
        summary="P/D decode: an abort frees a load's blocks at once, and the transfer writes into whoever has them by then",
        seam="disagg_config",
        models=("vLLM #32255",),
        finding="corrupt_stream",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="load-end-forgotten",
        module="load_end_forgotten",
        summary="P/D decode: the end of an aborted request's load is not noticed, and its blocks stay for good",
        seam="disagg_config",
        models=("vLLM #32255", "vllm-ascend #16662"),
        finding="kv_leak",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="late-load-kills-engine",
        module="late_load_kills_engine",
        summary="P/D decode: the end of an aborted request's load ends the engine",
        seam="disagg_config",
        models=("vLLM #43226", "vLLM #46240"),
        finding="wedged",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="ordered-reaper",
        module="ordered_reaper",
        summary="P/D prefill: leases that have run out are not reaped behind an older one that is renewed",
        seam="disagg_config",
        models=("vLLM #58222",),
        finding="kv_leak",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="one-timeout",
        module="one_timeout",
        summary="P/D prefill: blocks are held for one timeout that no heartbeat extends",
        seam="disagg_config",
        models=("vLLM #25897", "vLLM #41383"),
        finding="lease_expired",
        option="the timeout, default 120s",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="heartbeats-ignored",
        module="heartbeats_ignored",
        summary="P/D prefill: heartbeats come, and no lease is renewed by them",
        seam="disagg_config",
        models=("vLLM #53095",),
        finding="lease_expired",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="notified-by-own-id",
        module="notified_by_own_id",
        summary="P/D decode: the prefill is told the decode's id of a request, which it does not know",
        seam="disagg_config",
        models=("vLLM #36958",),
        finding="lease_expired",
        pair=VLLM_PD,
    ),
    CatalogueEntry(
        name="refusal-tells-nobody",
        module="refusal_tells_nobody",
        summary="P/D decode: a request that it refuses leaves the prefill to its lease",
        seam="disagg_config",
        models=("vLLM reference §9.10, entry 39",),
        finding="lease_expired",
        pair=VLLM_PD,
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
