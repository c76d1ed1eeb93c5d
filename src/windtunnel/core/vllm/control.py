"""What an operator has done to an engine: paused, asleep, frozen, dead (vLLM reference §3.8, §3.9)."""

from dataclasses import dataclass
from typing import Literal

from windtunnel.core.outputs import EngineError, Refusal

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
PAUSED = "The engine is paused and takes no new requests. Please retry after it has been resumed."


@dataclass(slots=True)
class ControlState:
    """Owned by the engine."""

    paused: PauseMode | None = None
    sleep_level: int | None = None
    """None: awake. 0: scheduling paused only; 1: weights offloaded; 2: everything discarded."""
    frozen_until_ns: int = 0
    thawing: bool = False
    """The next step is the first after a freeze: deadlines that passed meanwhile are not made up for."""
    death: EngineError | None = None

    @property
    def scheduling(self) -> bool:
        """False while nothing may be computed."""
        return self.paused != "keep" and self.death is None

    @property
    def sleep_state(self) -> str:
        """The `sleep_state` label that is 1."""
        return {None: "awake", 0: "awake", 1: "weights_offloaded"}.get(self.sleep_level, "discard_all")

    def refusal(self) -> Refusal | None:
        """Why nothing new is taken, or None."""
        if self.death is not None:
            return Refusal("dead", self.death.message, self.death.status, self.death.kind)
        if self.paused in ("abort", "wait"):
            return Refusal("paused", PAUSED, 503, "ServiceUnavailableError")
        return None
