"""Fault `lost-tokens`: every second stream loses one frame in its middle (what a check of the text must see)."""

import itertools
from typing import Any

from windtunnel.faults.family import attach_encoder
from windtunnel.faults.proxy import Proxy
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
        streams = itertools.count()

        def wrap(encoder: Any, _family: str) -> Any:
            return LosingEncoder(encoder) if next(streams) % 2 else encoder

        return attach_encoder(seams, wrap)


FAULT = LostTokens()
