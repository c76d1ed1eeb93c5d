"""What an engine says to others (vLLM reference §7.2): a handshake, then everything that waited for it; and heartbeats.

Where an engine is stands in a request's parameters, which a client may have written. So a peer is its engine id *and* the
address that was told with it: a false address harms nobody but the requests that name it. vLLM goes by the engine id alone.
"""

from collections import Counter
from typing import TypeVar

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
        self._ready: dict[Peer, None] = {}
        """The oldest first."""
        self._waiting: dict[Peer, list[Ask]] = {}

    def ready(self, peer: Peer) -> bool:
        return peer in self._ready

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
        if peer not in self._waiting:
            self._waiting[peer] = []
            self.outgoing.append(AskHandshake(peer))
        return self._waiting[peer]

    def answered(self, report: HandshakeDone) -> str | None:
        """Why this answer is a failure; None if it is none, and then everything that waited goes out."""
        peer, answer = report.peer, report.answer
        if peer not in self._waiting:
            return None
        reason = self.mismatch(peer, answer)
        if reason is None:
            if len(self._ready) >= MAX_PEERS:
                del self._ready[next(iter(self._ready))]
            self._ready[peer] = None
            self.outgoing += self._waiting.pop(peer)
        return reason

    def mismatch(self, peer: Peer, answer: Handshake) -> str | None:
        """Why this hand is not taken; None if it is."""
        if answer.engine_id != peer.engine_id:
            expected, received = shown(peer.engine_id), shown(answer.engine_id)
            return f"Remote NIXL agent engine ID mismatch. Expected {expected}, received {received}."
        mine = self._config.compatibility_hash
        if self._config.enforce_handshake_compat and answer.compatibility_hash != mine:
            return f"NIXL compatibility hash mismatch. Local: {mine}, Remote: {shown(answer.compatibility_hash)}."
        return ranks_mismatch(self._config.tp_size, answer.tp_size)

    def given_up(self, peer: Peer) -> list[Ask] | None:
        """The handshake has failed: what waited for it and will not go out; None if none was under way."""
        return self._waiting.pop(peer, None)

    def clear(self) -> None:
        self.outgoing.clear()
        self._waiting.clear()


class Heart:
    """Tells prefills, at intervals, which of their requests are still wanted. Owned by a connector."""

    def __init__(self, interval_ns: int | None) -> None:
        self._interval_ns = interval_ns
        self._last_ns: int | None = None
        self._since_ns = 0
        self._wanted: dict[Peer, Counter[str]] = {}
        """Each peer's request ids, and how many of our requests want each."""
        self._remotes: dict[str, Remote] = {}

    def start(self, request_id: str, remote: Remote, now_ns: int) -> None:
        if self._interval_ns is None:
            return
        if not self._remotes:
            self._since_ns = now_ns
        self._remotes[request_id] = remote
        self._wanted.setdefault(remote.peer, Counter())[remote.request_id] += 1

    def stop(self, request_id: str) -> None:
        remote = self._remotes.pop(request_id, None)
        if remote is None:
            return
        wanted = self._wanted[remote.peer]
        wanted[remote.request_id] -= 1
        if not wanted[remote.request_id]:
            del wanted[remote.request_id]
        if not wanted:
            del self._wanted[remote.peer]

    def next_at(self) -> int | None:
        """The interval is the engine's, not the request's: after a long silence the first beat is due at once."""
        if self._interval_ns is None or not self._wanted:
            return None
        return self._since_ns if self._last_ns is None else max(self._since_ns, self._last_ns + self._interval_ns)

    def beat(self, now_ns: int) -> list[Notify]:
        self._last_ns = now_ns
        return [
            Notify(peer, Heartbeat(ids)) for peer, wanted in self._wanted.items() for ids in portions(tuple(wanted), IDS_A_BEAT)
        ]

    def clear(self) -> None:
        self._wanted.clear()
        self._remotes.clear()


def ranks_mismatch(local: int, remote: int) -> str | None:
    """Why tensor-parallel ranks cannot be paired: vLLM's assertions of `TransferTopology.tp_ratio`; None if they can.

    Of the larger side so many ranks read from (or are read by) one of the smaller.
    """
    if max(local, remote) % min(local, remote) == 0:
        return None
    larger, smaller = (("Local", local), ("remote", remote)) if local > remote else (("Remote", remote), ("local", local))
    return f"{larger[0]} tensor parallel size {larger[1]} is not divisible by {smaller[0]} tensor parallel size {smaller[1]}."


def portions(items: tuple[Item, ...], size: int) -> list[tuple[Item, ...]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
