"""Fault `lost-tokens`: every second stream loses one frame in its middle (what a check of the text must see)."""

from typing import Any

from windtunnel.faults.family import attach_encoder
from windtunnel.faults.proxy import Proxy, every_second
from windtunnel.serve.seams import Seams
from windtunnel.wire.family import Delta, Usage

_LOST = 2


class LosingEncoder(Proxy):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._deltas = 0

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        self._deltas += 1
        frames: bytes = self._inner.delta(delta, usage)
        return b"" if self._deltas == _LOST and delta.finish_reason is None else frames

    def plain(self, _index: int) -> None:
        return None


class LostTokens:
    NAME = "lost-tokens"

    def attach(self, seams: Seams) -> Seams:
        return attach_encoder(seams, every_second(LosingEncoder))


FAULT = LostTokens()
