"""What an engine says to others (vLLM reference §7.2): a handshake, then everything that waited for it; and heartbeats."""

from collections import Counter
from typing import NamedTuple, TypeVar

from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.params import Remote
from windtunnel.core.vllm.connector.seam import Ask, AskHandshake, Handshake, HandshakeDone, Heartbeat, Notify, Peer

Item = TypeVar("Item")
MAX_PEERS = 1024
MAX_WAITING = 4096
"""Asks that wait for one handshake."""
IDS_A_BEAT = 512
"""Ids in one heartbeat: with the longest ones it fits into one message of the data plane."""


class PeerBook:
    """Who has shaken hands, and what waits for it. Owned by a connector."""

    def __init__(self, config: KvTransferConfig) -> None:
        self.outgoing: list[Ask] = []
        self._config = config
        self._ready: dict[str, None] = {}
        """Engine ids, the oldest first."""
        self._waiting: dict[str, list[Ask]] = {}

    def ready(self, peer: Peer) -> bool:
        return peer.engine_id in self._ready

    def ask(self, peer: Peer, ask: Ask) -> bool:
        """Now, or after the handshake. False when too much waits for that already."""
        if self.ready(peer):
            self.outgoing.append(ask)
            return True
        waiting = self.shake(peer)
        if len(waiting) >= MAX_WAITING:
            return False
        waiting.append(ask)
        return True

    def shake(self, peer: Peer) -> list[Ask]:
        """Make sure that a handshake is under way; what waits for it."""
        if peer.engine_id not in self._waiting:
            self._waiting[peer.engine_id] = []
            self.outgoing.append(AskHandshake(peer))
        return self._waiting[peer.engine_id]

    def answered(self, report: HandshakeDone) -> str | None:
        """Why this answer is a failure; None if it is none, and then everything that waited goes out."""
        peer, answer = report.peer, report.answer
        if peer.engine_id not in self._waiting:
            return None
        reason = self._mismatch(peer, answer)
        if reason is None:
            if len(self._ready) >= MAX_PEERS:
                del self._ready[next(iter(self._ready))]
            self._ready[peer.engine_id] = None
            self.outgoing += self._waiting.pop(peer.engine_id)
        return reason

    def _mismatch(self, peer: Peer, answer: Handshake) -> str | None:
        if answer.engine_id != peer.engine_id:
            expected, received = shown(peer.engine_id), shown(answer.engine_id)
            return f"Remote NIXL agent engine ID mismatch. Expected {expected}, received {received}."
        mine = self._config.compatibility_hash
        if self._config.enforce_handshake_compat and answer.compatibility_hash != mine:
            return f"NIXL compatibility hash mismatch. Local: {mine}, Remote: {shown(answer.compatibility_hash)}."
        return None

    def given_up(self, peer: Peer) -> list[Ask] | None:
        """The handshake has failed: what waited for it and will not go out; None if none was under way."""
        return self._waiting.pop(peer.engine_id, None)

    def clear(self) -> None:
        self.outgoing.clear()
        self._waiting.clear()


class _Beat(NamedTuple):
    peer: Peer
    wanted: Counter[str]
    """The peer's request ids, and how many of our requests want each."""


class Heart:
    """Tells prefills, at intervals, which of their requests are still wanted. Owned by a connector."""

    def __init__(self, interval_ns: int | None) -> None:
        self._interval_ns = interval_ns
        self._last_ns: int | None = None
        self._since_ns = 0
        self._beats: dict[str, _Beat] = {}
        self._remotes: dict[str, Remote] = {}

    def start(self, request_id: str, remote: Remote, now_ns: int) -> None:
        if self._interval_ns is None:
            return
        if not self._remotes:
            self._since_ns = now_ns
        self._remotes[request_id] = remote
        beat = self._beats.setdefault(remote.peer.engine_id, _Beat(remote.peer, Counter()))
        beat.wanted[remote.request_id] += 1

    def stop(self, request_id: str) -> None:
        remote = self._remotes.pop(request_id, None)
        if remote is None:
            return
        wanted = self._beats[remote.peer.engine_id].wanted
        wanted[remote.request_id] -= 1
        if not wanted[remote.request_id]:
            del wanted[remote.request_id]
        if not wanted:
            del self._beats[remote.peer.engine_id]

    def next_at(self) -> int | None:
        """The interval is the engine's, not the request's: after a long silence the first beat is due at once."""
        if self._interval_ns is None or not self._beats:
            return None
        return self._since_ns if self._last_ns is None else max(self._since_ns, self._last_ns + self._interval_ns)

    def beat(self, now_ns: int) -> list[Notify]:
        self._last_ns = now_ns
        return [
            Notify(beat.peer, Heartbeat(ids))
            for beat in self._beats.values()
            for ids in portions(tuple(beat.wanted), IDS_A_BEAT)
        ]

    def clear(self) -> None:
        self._beats.clear()
        self._remotes.clear()


def portions(items: tuple[Item, ...], size: int) -> list[tuple[Item, ...]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
