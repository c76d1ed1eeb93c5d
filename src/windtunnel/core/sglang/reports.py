"""When an SGLang scheduler writes its gauges, and what it writes (SGLang reference §6.1, §6.3, §9).

Gauges are written with each prefill batch, with every fortieth decode step, and when the loop is idle: at once if the
published number of running requests is wrong, else 30 s after the last report. In between they stand still, whatever happens.

Not every report writes all of them (SGLang 0.5.23, `metrics_reporter.py`): lengths and routing keys of running requests come
with decode steps only, and keys only if every request has one. The throughput is that of the last decode report: an idle report
shows 0 for it, and so does a prefill report 30 s later. `num_retracted_reqs` is what the last retraction took since the batch
reported before. Nothing sets `num_paused_reqs`, nor `utilization` except on a prefill worker.
"""

from collections.abc import Mapping

from windtunnel.core.outputs import StepStats
from windtunnel.core.sglang.batch import Batch
from windtunnel.core.sglang.scheduler import SglangScheduler
from windtunnel.core.units import S

THROUGHPUT_STALE_NS = 30 * S


class Reports:
    """Owned by one loop: what has happened since the last report, and what that said."""

    def __init__(self, scheduler: SglangScheduler) -> None:
        self._scheduler = scheduler
        self._decode_steps = 0
        self._prefill_tokens = self._decode_tokens = self._preemptions = self._queries = self._hits = 0
        self._evicted_pages = 0
        """When the last report was made."""
        self._throughput_tokens = 0
        self._throughput_since_ns = 0
        self._throughput = 0.0
        self._retracted = self._retracted_shown = 0
        self._of_decoding: Mapping[str, float] = {}
        self._hit_rate = 0.0
        self._changed = False
        self.last_ns = 0
        self.published_running = 0
        self.running_of_batch: int | None = None
        """On a P/D prefill worker: the size of the last batch, shown as `num_running_reqs`."""

    def note(self, batch: Batch) -> bool:
        """Count a batch that has ended. True: it is to be reported."""
        self._changed = True
        if batch.prefill:
            new, cached = batch.new_tokens, batch.cached_tokens
            self._prefill_tokens += new
            self._queries += new + cached
            self._hits += cached
            self._hit_rate = cached / (new + cached) if new + cached else 0.0
            return True
        self._decode_steps += 1
        self._decode_tokens += len(batch.decoding)
        self._throughput_tokens += len(batch.decoding)
        return self._decode_steps % self._scheduler.config.decode_log_interval == 0

    def retracted(self, count: int) -> None:
        self._preemptions += count
        self._retracted = count

    def changed(self) -> None:
        """Something that gauges show has happened outside a batch."""
        self._changed = True

    def idle_due_ns(self, now_ns: int, running: int) -> int | None:
        """When an idle loop reports next; None if nothing has changed since."""
        if self.published_running != running:
            return now_ns
        return max(now_ns, self.last_ns + self._scheduler.config.idle_report_ns) if self._changed else None

    def make(self, at_ns: int, extra: Mapping[str, float], batch: Batch | None) -> StepStats:
        """The report itself: gauges as they are, increments since the last one. `batch` is None for an idle report."""
        scheduler = self._scheduler
        running = self._running(batch)
        if batch is not None:
            self._retracted_shown, self._retracted = self._retracted, 0
        if batch is not None and not batch.prefill:
            self._measure(at_ns)
        elif at_ns - self._throughput_since_ns > THROUGHPUT_STALE_NS:
            self._throughput = 0.0
        stats = StepStats(
            running=running,
            waiting=len(scheduler.waiting) + (scheduler.chunked is not None),
            deferred=len(scheduler.grammar_waits),
            kv_usage=scheduler.memory.usage,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            preemptions=self._preemptions,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            extra={**self._gauges(idle=batch is None), "evicted_tokens": self._evicted_tokens(), **extra},
        )
        self._prefill_tokens = self._decode_tokens = self._preemptions = self._queries = self._hits = 0
        self.published_running, self.last_ns, self._changed = running, at_ns, False
        return stats

    def _evicted_tokens(self) -> int:
        """Since the last report."""
        memory = self._scheduler.memory
        before, self._evicted_pages = self._evicted_pages, memory.tree.evicted_pages
        return (self._evicted_pages - before) * memory.page_size

    def _running(self, batch: Batch | None) -> int:
        if batch is None:
            return len(self._scheduler.running)
        if self.running_of_batch is not None:
            return self.running_of_batch
        return batch.running_before if batch.prefill else len(self._scheduler.running)

    def _measure(self, at_ns: int) -> None:
        """With a decode report."""
        elapsed_ns = at_ns - self._throughput_since_ns
        self._throughput = self._throughput_tokens * S / elapsed_ns if elapsed_ns > 0 else 0.0
        self._throughput_tokens, self._throughput_since_ns = 0, at_ns
        running = self._scheduler.running
        keys = [one.request.routing_key for one in running]
        told: dict[str, float] = {"decode_sum_seq_lens": sum(sequence.num_tokens for sequence in running)}
        if None not in keys:
            told["num_unique_running_routing_keys"] = len(set(keys))
        self._of_decoding = {**self._of_decoding, **told}

    def _gauges(self, *, idle: bool) -> dict[str, float]:
        scheduler, memory = self._scheduler, self._scheduler.memory
        usage = round(memory.usage, 2)
        return {
            "token_usage": usage,
            "full_token_usage": usage,
            "num_used_tokens": memory.used_tokens,
            "kv_used_tokens": memory.used_tokens,
            "kv_available_tokens": memory.available_tokens,
            "kv_evictable_tokens": memory.evictable_tokens,
            "max_total_num_tokens": memory.capacity,
            "cache_hit_rate": self._hit_rate,
            "gen_throughput": 0.0 if idle else self._throughput,
            "new_token_ratio": scheduler.ratio.value,
            "num_grammar_queue_reqs": len(scheduler.grammar_waits),
            "num_retracted_reqs": self._retracted_shown,
            **self._of_decoding,
        }
