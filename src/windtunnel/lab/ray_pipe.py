"""Client processes as actors of an existing Ray cluster, spread over its nodes.

Frames travel as calls of the actor: `take` gives it some, `give` waits until it has some. Ray is imported when it is asked for.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from windtunnel.lab.pipes import ClientsError, Pipe

if TYPE_CHECKING:
    from windtunnel.lab.client_process import ClientProcess

CLOSE_PATIENCE_S = 5
CONNECT_PATIENCE_S = 5


class RayClient:
    """The actor: a client process of the lab on a node. Owns the frames that the coordinator has not fetched."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._client: ClientProcess | None = None

    async def take(self, frame: bytes) -> None:
        """In the order in which the coordinator sends: nothing is awaited here."""
        self._started().receive(frame)

    async def give(self) -> list[bytes]:
        """At least one frame."""
        self._started()
        frames = [await self._frames.get()]
        while not self._frames.empty():
            frames.append(self._frames.get_nowait())
        return frames

    async def close(self) -> None:
        await self._started().close()

    def _started(self) -> "ClientProcess":
        from windtunnel.lab.client_process import ClientProcess

        if self._client is None:
            self._client = ClientProcess(self._frames.put_nowait)
        return self._client


class RayPipe:
    """One actor, as its coordinator reaches it."""

    def __init__(self, number: int, actor: Any, last: "_Connection") -> None:
        self.name = f"client {number} on Ray"
        self._actor = actor
        self._connection = last
        self._frames: list[bytes] = []
        self._why = "was ended by its coordinator"
        self._killed: str | None = None

    def send(self, frame: bytes) -> None:
        self._actor.take.remote(frame)

    async def receive(self) -> bytes | None:
        from ray.exceptions import RayError

        try:
            while not self._frames:
                self._frames = await self._actor.give.remote()
            return self._frames.pop(0)
        except RayError as error:
            self._why = self._killed or f"is gone: {' '.join(str(error).split())}"
            return None

    async def why(self) -> str:
        return self._why

    def kill(self, why: str) -> None:
        import ray

        self._killed = why
        ray.kill(self._actor)

    async def close(self) -> None:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_PATIENCE_S)
        ray.kill(self._actor)
        self._connection.leave()


class _Connection:
    """This process's connection to the cluster. It ends with the last pipe, if it was made for them."""

    def __init__(self, pipes: int, *, ours: bool) -> None:
        self._pipes = pipes
        self._ours = ours

    def leave(self) -> None:
        self._pipes -= 1
        if not self._pipes and self._ours:
            import ray

            ray.shutdown()


async def ray_pipes(count: int) -> Sequence[Pipe]:
    """So many actors on the cluster that RAY_ADDRESS names, or that runs on this machine. Raises ClientsError."""
    try:
        import ray
    except ImportError:
        raise ClientsError("--on ray needs the package ray: pip install 'windtunnel[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        await asyncio.to_thread(_connect)
    connection = _Connection(count, ours=ours)
    free = ray.available_resources().get("CPU", 0.0)
    if free < count:
        connection = _Connection(1, ours=ours)
        connection.leave()
        raise ClientsError(f"--on ray: {count} clients need a CPU each, the cluster has {free:g} free; lower --clients")
    remote = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0)(RayClient)
    return [RayPipe(number, remote.remote(), connection) for number in range(1, count + 1)]


_NO_CLUSTER = "--on ray: no Ray cluster answers; set RAY_ADDRESS or start one (ray start --head)"


def _connect() -> None:
    """Raises ClientsError. Ray ends the whole process when its head does not answer, so that is tried before."""
    import ray

    host, colon, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_PATIENCE_S).close()
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClientsError(f"{_NO_CLUSTER}: {' '.join(str(error).split())[:200]}") from error
