"""Fault `persistent-pin`: one request is in the prefill inflight queue from the start, on a handle that never settles.

Its transfer worker waits for ever (SGLang reference §1.6, ending 2; §3.3 has no limit for Transferring). The peer it
writes to does not exist, and its port is in a queue that no live decode socket of ours uses (`serve.sglang.sockets`).
"""

from collections.abc import Callable
from typing import Any

from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sources import SequenceSource
from windtunnel.core.transfer.backends import Fate, Write
from windtunnel.core.transfer.frames import Metadata
from windtunnel.serve.clock import now_ns
from windtunnel.serve.seams import Seams

NAME = "persistent-pin"
_ROOM = 1
_TOKENS = 64
_PEER = "127.0.0.1:128"


def _pinned(backend: Any) -> Any:
    """A transport on which this one room's handles stall."""
    fate: Callable[[Write], Fate] = backend.fate
    backend.fate = lambda write: Fate("stall") if write.chunk.room == _ROOM and write.peer == _PEER else fate(write)
    return backend


def _pin(worker: Any) -> Any:
    if not isinstance(worker, PrefillWorker):
        return worker
    at_ns = now_ns()
    request = EngineRequest(
        NAME, tuple(range(_TOKENS)), SequenceSource((0,)), 1, at_ns, bootstrap=("127.0.0.1", None, _ROOM), tags={"family": NAME}
    )
    worker.submit([request], at_ns)
    pages = tuple(range(-(-_TOKENS // worker.config.page_size)))
    for rank in range(len(worker.ranks)):
        worker.receive(Metadata(_ROOM, _PEER, pages, 0, 0, 1), at_ns, rank)
    return worker


class PersistentPin:
    NAME = NAME

    def attach(self, seams: Seams) -> Seams:
        return seams.around(transfer_backend=_pinned, connected=_pin)


FAULT = PersistentPin()
