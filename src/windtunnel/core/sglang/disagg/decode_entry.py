"""One request on the decode worker: its receivers, and how far they are (SGLang reference §3.2)."""

from windtunnel.core.sglang.disagg.receiver import KvReceiver, RoomReceiver
from windtunnel.core.sglang.disagg.worker import RoomEntry
from windtunnel.core.sglang.sequence import SglangSequence
from windtunnel.core.transfer.backends import FakeReceiver
from windtunnel.core.transfer.frames import Aux


class DecodeEntry(RoomEntry):
    """One request on the decode worker."""

    __slots__ = ("aux", "dp_rank", "ready", "ready_ns", "receivers", "resolved")

    def __init__(self, sequence: SglangSequence, address: str, room: int, receivers: list[KvReceiver]) -> None:
        super().__init__(sequence, address, room)
        self.receivers = receivers
        self.resolved = False
        """The prefill's ranks are known."""
        self.ready = False
        """The handshake is done."""
        self.ready_ns = 0
        self.dp_rank: int | None = None
        self.aux: Aux | None = None

    @property
    def fake(self) -> bool:
        return isinstance(self.receivers[0], FakeReceiver)

    @property
    def rooms(self) -> list[RoomReceiver]:
        return [receiver for receiver in self.receivers if isinstance(receiver, RoomReceiver)]
