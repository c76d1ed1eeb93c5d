"""The lines that SGLang's scheduler logs with its reports, which tests in the field grep (SGLang reference §9).

One for each prefill batch, and one every `--decode-log-interval` decode steps. `#new-seq` counts the sequences that a batch
admits, and a chunk of one admitted earlier as one. Off unless `--log-batches`: without pacing there are thousands a second.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import StepOutput, StepStats
from windtunnel.core.units import S

log = logging.getLogger("windtunnel.serve")

_PREFILL_QUEUES: Mapping[str, str] = MappingProxyType(
    {
        "num_prefill_bootstrap_queue_reqs": "#bootstrap-req",
        "num_prefill_prealloc_queue_reqs": "#prealloc-req",
        "num_prefill_inflight_queue_reqs": "#inflight-req",
    }
)
_DECODE_QUEUES: Mapping[str, str] = MappingProxyType(
    {
        "num_decode_prealloc_queue_reqs": "#prealloc-req",
        "num_decode_transfer_queue_reqs": "#transfer-req",
        "decode_retracted_queue_reqs": "#retracted-req",
    }
)


class BatchLog:
    """Observes the steps of all ranks. Owned by the server's drivers."""

    def __init__(self) -> None:
        self._prefill_at_ns: dict[int, int] = {}
        """When each rank last reported a prefill."""

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        stats = step.stats
        if stats is None:
            return
        if stats.prefill_tokens or stats.prefix_hits:
            since_ns = step.at_ns - self._prefill_at_ns.get(rank, step.at_ns)
            self._prefill_at_ns[rank] = step.at_ns
            admitted = sum(transition.event is Event.SCHEDULE for transition in step.transitions)
            log.info("Prefill batch, %s", _prefill(stats, max(1, admitted), since_ns))
        elif stats.decode_tokens and step.outputs:
            log.info("Decode batch, %s", _decode(stats))


def _prefill(stats: StepStats, admitted: int, since_ns: int) -> str:
    return ", ".join(
        (
            f"#new-seq: {admitted}",
            f"#new-token: {stats.prefill_tokens}",
            f"#cached-token: {stats.prefix_hits}",
            f"token usage: {stats.kv_usage:.2f}",
            f"#running-req: {stats.running}",
            f"#queue-req: {stats.waiting}",
            *_queues(stats, _PREFILL_QUEUES),
            f"input throughput (token/s): {stats.prefill_tokens * S / since_ns if since_ns else 0:.2f}",
        )
    )


def _decode(stats: StepStats) -> str:
    return ", ".join(
        (
            f"#running-req: {stats.running}",
            f"#token: {int(stats.extra['num_used_tokens'])}",
            f"token usage: {stats.kv_usage:.2f}",
            *(_queues(stats, _DECODE_QUEUES) if "num_decode_prealloc_queue_reqs" in stats.extra else ()),
            f"gen throughput (token/s): {stats.extra['gen_throughput']:.2f}",
            f"#queue-req: {stats.waiting}",
        )
    )


def _queues(stats: StepStats, names: Mapping[str, str]) -> list[str]:
    return [f"{shown}: {int(stats.extra[stem])}" for stem, shown in names.items() if stem in stats.extra]
