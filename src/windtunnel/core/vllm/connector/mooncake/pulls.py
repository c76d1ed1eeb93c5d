"""What a decode has asked prefills for: pulls, and how long it waits for their answers."""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice, takewhile

from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.params import ID_LIMIT_BYTES, is_text
from windtunnel.core.vllm.connector.peers import PeerBook, portions
from windtunnel.core.vllm.connector.seam import Notify, Peer, Pull, Pulls

MAX_PULLS = 4096
"""In one `Pulls`."""


class _Asked:
    """What one turn of ours has asked one prefill for. Owned by its book."""

    __slots__ = ("deadline_ns", "peer", "pulls")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.deadline_ns = 0
        """Starts again with every answer."""
        self.pulls: dict[str, Pull] = {}
        """Those without an answer yet, by our request id."""


class PullBook:
    """Pulls without an answer. Owned by a `MooncakeConnector`."""

    def __init__(self, config: KvTransferConfig, peers: PeerBook, block_bytes: int) -> None:
        self._config = config
        self._peers = peers
        self._block_bytes = block_bytes
        self._unsent: dict[Peer, _Asked] = {}
        """Of this turn; those to one peer share their patience."""
        self._pulling: dict[str, _Asked] = {}
        """By our request id."""
        self._asked: dict[int, _Asked] = {}
        """What has no answer yet, by identity, in the order of deadlines."""
        self._unheard: list[str] = []
        """Pulls that have failed on our side: one whose id cannot be sent, or too much waits for the handshake."""

    def __len__(self) -> int:
        return len(self._pulling)

    def add(self, peer: Peer, pull: Pull, now_ns: int) -> None:
        """It goes out with the others of this turn."""
        asked = self._unsent.setdefault(peer, _Asked(peer))
        asked.pulls[pull.request_id] = pull
        self._pulling[pull.request_id] = asked
        self._be_patient(asked, now_ns)

    def _be_patient(self, asked: _Asked, now_ns: int) -> None:
        asked.deadline_ns = now_ns + self._config.hold_ns + self._config.pull_margin_ns
        self._asked.pop(id(asked), None)
        if asked.pulls:
            self._asked[id(asked)] = asked

    def send(self) -> None:
        """The turn is over."""
        unsent, self._unsent = self._unsent, {}
        config = self._config
        mine = Peer(config.engine_id, config.side_channel_host, config.side_channel_port, config.tp_size)
        for asked in unsent.values():
            self._unheard += [one for one in asked.pulls if not is_text(one, ID_LIMIT_BYTES)]
            sendable = tuple(pull for one, pull in asked.pulls.items() if is_text(one, ID_LIMIT_BYTES))
            for pulls in portions(sendable, MAX_PULLS):
                if not self._peers.ask(asked.peer, Notify(asked.peer, Pulls(mine, pulls, self._block_bytes))):
                    self._unheard += [pull.request_id for pull in pulls]

    def end(self, request_id: str, now_ns: int) -> bool:
        """There is an answer, and the others of its turn may take all their time again. False where none is due."""
        asked = self._pulling.pop(request_id, None)
        if asked is None:
            return False
        del asked.pulls[request_id]
        self._be_patient(asked, now_ns)
        return True

    def next_at(self) -> int | None:
        if self._unheard:
            return 0
        return next((asked.deadline_ns for asked in islice(self._asked.values(), 1)), None)

    def take_due(self, now_ns: int) -> list[str]:
        """Those that get no answer any more; each is to be ended."""
        unheard, self._unheard = self._unheard, []
        overdue = takewhile(lambda asked: asked.deadline_ns <= now_ns, self._asked.values())
        return [*unheard, *(request_id for asked in overdue for request_id in asked.pulls)]

    def clear(self) -> None:
        for book in (self._unsent, self._pulling, self._asked, self._unheard):
            book.clear()


def digest_of(prompt: Sequence[int]) -> str:
    """Ours: real blocks say nothing about their prompt."""
    return sha256(array("q", prompt).tobytes()).hexdigest()[:32]
