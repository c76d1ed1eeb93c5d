"""Fault `empty-success`: every second stream is its terminator and nothing else, under 200 (vLLM #40978, #41929)."""

from windtunnel.faults.family import attach_encoder
from windtunnel.faults.proxy import Proxy, every_second
from windtunnel.serve.seams import Seams
from windtunnel.wire.family import Delta, Usage


class EmptyEncoder(Proxy):
    """Loses the frames. Only the last one of what ends the stream is left."""

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        return b""

    def plain(self, _index: int) -> None:
        return None

    def close(self, usage: Usage) -> bytes:
        frames: bytes = self._inner.close(usage)
        return frames[frames[:-2].rfind(b"\n\n") + 2 :] if b"\n\n" in frames[:-2] else frames


class EmptySuccess:
    NAME = "empty-success"

    def attach(self, seams: Seams) -> Seams:
        return attach_encoder(seams, every_second(EmptyEncoder))


FAULT = EmptySuccess()
