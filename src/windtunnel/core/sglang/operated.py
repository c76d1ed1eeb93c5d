"""What an operator can do to any SGLang worker: change limits, pause, flush, freeze, kill."""

from typing import ClassVar

from windtunnel.core.outputs import EngineError
from windtunnel.core.pacing import Pacing
from windtunnel.core.sglang.config import LIVE_FIELDS, SglangEngineConfig
from windtunnel.core.sglang.loop import PauseMode, SglangLoop

DEATH = "The scheduler has died."


class OperatedLoop(SglangLoop):
    """A loop with its switches."""

    pause_modes: ClassVar[tuple[PauseMode, ...]] = ("abort", "in_place")

    def reconfigure(self, config: SglangEngineConfig, pacing: Pacing | None = None, *, now_ns: int = 0) -> None:
        """Change limits and pace together, from the next batch on. Raises ValueError if `config` differs in a fixed field."""
        changed = [name for name in config.__slots__ if getattr(config, name) != getattr(self.config, name)]
        fixed = [name for name in changed if name not in LIVE_FIELDS]
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot change while the engine runs; {', '.join(sorted(LIVE_FIELDS))} can")
        self.wake(now_ns)
        self.config = self.scheduler.config = config
        if pacing is not None:
            self.scheduler.repace(pacing)

    def pause(self, mode: PauseMode, now_ns: int) -> int:
        """`abort`: end all with notice. `retract`: running ones give up their KV and wait. `in_place`: all stop as they are.

        New requests are taken and wait. Returns how many were ended. Raises ValueError for a mode that is not possible here.
        """
        if mode not in self.pause_modes:
            raise ValueError(f"mode is {mode!r}: must be one of {', '.join(self.pause_modes)}")
        self.wake(now_ns)
        self.paused = mode
        if mode == "retract":
            self._retract_all(now_ns)
        return self.abort_matching("", now_ns, abort_all=True) if mode == "abort" else 0

    def _retract_all(self, now_ns: int) -> None:
        """Those that an abort has already reached end with the pause instead."""
        chunked = [self.scheduler.chunked] if self.scheduler.chunked is not None else []
        for sequence in [*self.scheduler.running, *chunked]:
            if sequence.abort is None:
                self.scheduler.retract(sequence, now_ns)
        self.requeue_retracted(self.scheduler.take_retracted(), now_ns)

    def resume(self, now_ns: int) -> None:
        self.paused = None
        self.scheduler.delay_until(now_ns)
        self.wake(now_ns)

    def flush_cache(self, now_ns: int) -> bool:
        """Forget the radix cache; False while anything is live (reference §7.3: the refusal is a 400)."""
        if not self.idle or self.scheduler.memory.tree.protected_pages:
            return False
        self.wake(now_ns)
        self.scheduler.memory.tree.reset()
        return True

    def freeze(self, until_ns: int) -> None:
        """Neither start nor end a batch before `until_ns`: a scheduler that hangs."""
        self.frozen_until_ns = until_ns

    def kill(self, now_ns: int, message: str = DEATH) -> int:
        """The scheduler dies: everything live fails, nothing more is taken. Returns how many failed."""
        error = EngineError(message)
        victims = list(self.sequences.values())
        self.batch = None
        self.wake(now_ns)
        for sequence in victims:
            self.fail(sequence, error, now_ns)
        self.dead = error
        return len(victims)
