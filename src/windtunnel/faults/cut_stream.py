"""Fault `cut-stream`: every second stream ends after a few frames without its terminator (vLLM #22341, Responses)."""

from functools import partial
from typing import Any

from windtunnel.faults.proxy import Proxy, every_second
from windtunnel.serve.seams import Seams


class CuttingSink(Proxy):
    """Closes the connection instead of writing frame number `frames + 1`."""

    def __init__(self, inner: Any, frames: int) -> None:
        super().__init__(inner)
        self._left = frames

    @property
    def blocked(self) -> Any:
        return self._inner.blocked

    def lane(self, _head: bytes, _tail: bytes) -> None:
        return None

    def write(self, frames: bytes) -> None:
        self._left -= frames.count(b"\n\n")
        if self._left < 0:
            self._inner.cut()
        else:
            self._inner.write(frames)


class CutStream:
    NAME = "cut-stream"

    def __init__(self, frames: int = 3) -> None:
        self._frames = frames

    def with_option(self, text: str) -> "CutStream":
        if not text.isascii() or not text.isdigit():
            raise ValueError(f"{self.NAME}:{text}: must be a number of frames")
        return CutStream(int(text))

    def attach(self, seams: Seams) -> Seams:
        return seams.around(sink=every_second(partial(CuttingSink, frames=self._frames)))


FAULT = CutStream()
