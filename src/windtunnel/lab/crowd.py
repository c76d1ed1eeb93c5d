"""Those who ask in a storm: streams that stay, streams that leave and try again, and bystanders."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from windtunnel.lab.asks import AskMaker
from windtunnel.lab.clients import Clients, LocalClients
from windtunnel.lab.connection import ConnectionCut, How, MalformedResponse, fetch
from windtunnel.lab.leave import Leave
from windtunnel.lab.plan import BystanderKind, Role, Shape, StormPlan
from windtunnel.lab.record import Ask, BystanderRecord, End, StreamRecord
from windtunnel.lab.sampler import Sampler
from windtunnel.lab.session import Session

_MODELS_PATH = "/v1/models"
"""What a bystander gets instead of `/metrics` where there are none."""


class Crowd:
    """Owns the records of streams and bystanders. `clients` sends the requests: this process, until there are others."""

    def __init__(self, session: Session, plan: StormPlan, maker: AskMaker, sampler: Sampler) -> None:
        self._session = session
        self._plan = plan
        self._maker = maker
        self._sampler = sampler
        self.clients: Clients = LocalClients(session)
        self.streams: list[StreamRecord] = []
        self.bystanders: list[BystanderRecord] = []
        self._next_bystander = count()

    def ask(self, role: Role, shape: Shape, round_: int = 0) -> Ask:
        return self._maker.ask(role, round_, shape)

    async def bystander_round(self, round_: int) -> None:
        """This round's share of the bystanders, by a few clients that each ask one after the other."""
        share = self._plan.bystanders * (round_ + 1) // self._plan.rounds - self._plan.bystanders * round_ // self._plan.rounds
        todo = iter(range(share))

        async def one_client() -> None:
            for _ in todo:
                await self._bystander()
                await asyncio.sleep(self._plan.bystander_gap_ns / 1e9)

        await _all([asyncio.create_task(one_client()) for _ in range(min(share, self._plan.bystander_concurrency))])

    async def _bystander(self) -> None:
        kinds = self._plan.bystander_kinds
        kind = kinds[next(self._next_bystander) % len(kinds)]
        one = await (self._bystander_get(kind) if kind.shape is None else self._bystander_generation(kind))
        if one is not None:
            self.bystanders.append(one)

    async def _bystander_get(self, kind: BystanderKind) -> BystanderRecord:
        session = self._session
        sent_ns, status, error = session.now_ns(), None, None
        base = session.target.metrics[0]
        path = _MODELS_PATH if kind.path == "/metrics" and self._sampler.blind else kind.path or base.path
        try:
            async with asyncio.timeout(session.timeout_ns / 1e9):
                headers = session.target.headers_for(base.origin)
                answer = await fetch(base.origin, "GET", base.request_path if path == "/metrics" else path, headers)
            status = answer.status
            error = "an empty body" if status == 200 and not answer.body else None
        except TimeoutError:
            error = "no answer in time"
        except (OSError, ConnectionCut, MalformedResponse) as failure:
            error = str(failure)
        return BystanderRecord(kind.name, sent_ns, session.now_ns(), kind.expect_status, status, error)

    async def _bystander_generation(self, kind: BystanderKind) -> BystanderRecord | None:
        """None when the client process that asked is gone: what the server did is not known."""
        assert kind.shape is not None
        ask = self.ask(Role.BYSTANDER, kind.shape)
        record = await self.clients.run(ask)
        wrong = record.end is not End.FINISHED and record.status == kind.expect_status == 200
        error = record.error if record.status is None or wrong else None
        self.streams.append(record)
        if record.end is End.CLIENT_DIED:
            return None
        return BystanderRecord(kind.name, record.started_ns, record.ended_ns, kind.expect_status, record.status, error, ask.tag)

    async def send(
        self, asks: Sequence[tuple[Ask, Leave | None]], concurrency: int, offsets: Sequence[int] | None = None
    ) -> None:
        """All of `asks`, by so many clients that each send one after the other, none before its offset."""
        begun_ns = self._session.now_ns()
        todo = iter(zip(asks, offsets or [0] * len(asks), strict=True))

        async def one_client() -> None:
            for (ask, leave), offset_ns in todo:
                early_ns = begun_ns + offset_ns - self._session.now_ns()
                if early_ns > 0:
                    await asyncio.sleep(early_ns / 1e9)
                await self.follow(ask, leave)

        await _all([asyncio.create_task(one_client()) for _ in range(min(len(asks), concurrency))])

    async def follow(self, ask: Ask, leave: Leave | None = None) -> None:
        record = await self.clients.run(ask, leave)
        self.streams.append(record)
        if leave is not None and leave.how is How.TIMEOUT_RETRY and record.end is End.LEFT:
            await self._retry(ask, replace(leave, gate=None))

    async def _retry(self, ask: Ask, leave: Leave) -> None:
        """All further attempts leave like the first, except the last, which stays."""
        for left in reversed(range(self._plan.retries)):
            again = self._maker.again(ask, Role.VICTIM if left else Role.RETRY)
            record = await self.clients.run(again, leave if left else None)
            self.streams.append(record)
            if record.end is not End.LEFT:
                return


async def _all(tasks: list["asyncio.Task[None]"]) -> None:
    """Wait for all; when this is cancelled, so are they."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
