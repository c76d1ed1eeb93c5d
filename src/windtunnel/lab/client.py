"""One generation request, from its first byte to its end, with an exact record of what the client saw."""

import asyncio

from windtunnel.lab.connection import ConnectionCut, How, MalformedResponse
from windtunnel.lab.leave import Leave
from windtunnel.lab.links import Link
from windtunnel.lab.plan import Moment, Trigger
from windtunnel.lab.record import Ask, End, StreamRecord
from windtunnel.lab.recorder import Recorder
from windtunnel.lab.session import Session


async def run_request(session: Session, ask: Ask, leave: Leave | None = None) -> StreamRecord:
    """Send one request and follow it to its end, or leave it as `leave` says. Every failure of the target is a value."""
    recorder = Recorder(session, ask)
    session.came(ask)
    try:
        async with asyncio.timeout(session.timeout_ns / 1e9):
            await _exchange(session, recorder, leave)
    except TimeoutError:
        recorder.failed(End.TIMEOUT, f"no end within {session.timeout_ns / 1e9:g} s")
    except ConnectionCut as error:
        recorder.failed(End.CUT, str(error))
    except MalformedResponse as error:
        recorder.failed(End.MALFORMED, str(error))
    except OSError as error:
        recorder.failed(End.REFUSED, str(error))
    finally:
        session.went(ask, session.now_ns())
        session.stages[recorder.stage] -= 1
        if leave is not None and leave.gate is not None and not recorder.at_gate:
            leave.gate.count_in()
    return recorder.record()


async def _exchange(session: Session, recorder: Recorder, leave: Leave | None) -> None:
    connection = await session.links.open(leave)
    try:
        if leave is not None and leave.when.moment is Moment.INCOMPLETE:
            await connection.send(recorder.ask, whole=False)
            await _go(connection, recorder, leave, None)
            return
        await connection.send(recorder.ask)
        recorder.enter("sent")
        reading = asyncio.ensure_future(connection.read(recorder))
        try:
            await (reading if leave is None or leave.by_itself else _until_leaving(connection, recorder, leave, reading))
        finally:
            await _cancelled(reading)
    finally:
        connection.leave(How.FIN)
        await connection.closed()


_AT_ONCE = frozenset({How.FIN, How.RST, How.KILL, How.RST_STREAM})
"""Ways of leaving that need nothing to be waited for."""


async def _until_leaving(connection: Link, recorder: Recorder, leave: Leave, reading: asyncio.Future[None]) -> None:
    if leave.gate is None and leave.how in _AT_ONCE and leave.when.moment in (Moment.TOKENS, Moment.END):
        await _leave_while_reading(connection, recorder, leave, reading)
        return
    due = asyncio.ensure_future(_due(recorder, leave))
    try:
        await asyncio.wait({due, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
        else:
            await due
            await _go(connection, recorder, leave, reading)
    finally:
        await _cancelled(due)


async def _leave_while_reading(connection: Link, recorder: Recorder, leave: Leave, reading: asyncio.Future[None]) -> None:
    """Leaves inside the reading of the token that it waits for: a thousand clients do not queue for a turn of the loop."""

    def go() -> None:
        recorder.due()
        recorder.left(leave.how)
        connection.leave(leave.how)

    recorder.tokens_wanted = _tokens_wanted(recorder.ask, leave.when)
    recorder.on_enough = go
    await reading


def _tokens_wanted(ask: Ask, when: Trigger) -> int:
    return when.count if when.moment is Moment.TOKENS else ask.max_tokens - when.count


async def _due(recorder: Recorder, leave: Leave) -> None:
    """Returns when this client is in the state in which it leaves."""
    moment = leave.when.moment
    if moment in (Moment.TOKENS, Moment.END):
        recorder.tokens_wanted = _tokens_wanted(recorder.ask, leave.when)
        await recorder.enough.wait()
    elif moment is Moment.HEAD:
        await recorder.head_seen.wait()
    elif moment is Moment.AFTER:
        await asyncio.sleep(leave.when.after_ns / 1e9)
    elif moment.of_target and leave.wait is not None:
        recorder.target_state = await leave.wait(recorder.ask, moment)
    if leave.gate is not None:
        recorder.at_gate = True
        leave.gate.count_in()
        await leave.gate.passed()
    recorder.due()


async def _go(connection: Link, recorder: Recorder, leave: Leave, reading: asyncio.Future[None] | None) -> None:
    if leave.how is How.STOP_READING and reading is not None:
        await _cancelled(reading)
        connection.stop_reading()
        await asyncio.sleep(leave.stall_ns / 1e9)
    recorder.left(leave.how)
    if leave.how is How.ABORT_ID:
        await connection.abort(recorder)
    else:
        connection.leave(leave.how)
    if leave.how in (How.HALF_CLOSE, How.ABORT_ID) and reading is not None:
        recorder.gone_ns = recorder.session.now_ns()
        await asyncio.wait({reading}, timeout=recorder.session.linger_ns / 1e9)


async def _cancelled(task: asyncio.Future[None]) -> None:
    """End a task of our own; what it raised belongs to whoever awaited it before."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
