"""Moves of blocks over a `TransferBackend`: the same backends that carry SGLang's pages.

A read is posted by its reader, a write by its writer; either is one handle. The backend knows rooms and pages: a move is a room
of its own, with one chunk that is the last.
"""

from collections.abc import Callable, Sequence

from windtunnel.core.transfer.backends import HandleState, TransferBackend, Write
from windtunnel.core.transfer.frames import KvChunk
from windtunnel.core.vllm.connector.seam import MoveDone, MoveFailed, Peer, StartRead, StartWrite

Move = StartRead | StartWrite


class BlockMover:
    """Owns the moves of one engine that are under way; the backend is its own too."""

    def __init__(self, backend: TransferBackend) -> None:
        self.backend = backend
        self._moves: dict[int, tuple[Move, int]] = {}
        """By number, with the handle."""

    def __len__(self) -> int:
        return len(self._moves)

    def start(self, move: Move, now_ns: int) -> None:
        chunk = KvChunk(move.number, 0, True, 0, move.local_blocks, 0, 0)
        handle = self.backend.post(Write(address(move.peer), chunk, move.size_bytes), now_ns)
        self._moves[move.number] = (move, handle)

    def next_event_at(self) -> int | None:
        return self.backend.next_event_at()

    def run(self, now_ns: int, overwritten: Callable[[Move], Sequence[int]]) -> list[MoveDone | MoveFailed]:
        """What has ended by now. `overwritten` is asked of each read as it lands: which places have somebody else's content."""
        self.backend.run(now_ns)
        reports: list[MoveDone | MoveFailed] = []
        for number, (move, handle) in list(self._moves.items()):
            state = self.backend.state(handle)
            if state is HandleState.IN_PROGRESS:
                continue
            del self._moves[number]
            self.backend.release(handle)
            done = state is HandleState.DONE
            reports.append(
                MoveDone(number, tuple(overwritten(move))) if done else MoveFailed(number, "the transport reports an error")
            )
        return reports


def address(peer: Peer) -> str:
    """How the backend knows the other end of a move."""
    return f"{peer.host}:{peer.port}"
