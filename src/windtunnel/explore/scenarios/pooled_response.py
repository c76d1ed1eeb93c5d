"""The cancelled-streams investigation as a model (DESIGN: the first of the two investigations).

A server keeps its request/response objects in a pool. A stream's handler starts a task and returns; its object goes back to
the pool and on to somebody else, while the task still holds it. The task has three reasons to report something on that object,
each a path of its own to the recycled object; a fix that closes one or two of them leaves the others.

With `owned` the task has its inputs by value: it has no object to write to. A failed write is logged, an error travels inside
the stream.
"""

from typing import NamedTuple

from windtunnel.explore import ENDS_ONCE, PROGRESS, Invariant, Model, Steps, always, eventually, parameter, process

FAILED_WRITE = "failed write"
MID_STREAM_ERROR = "error in mid-stream"
MISSING_CHOICE = "missing choice after the loop"

STREAM, STREAM_PATH = "stream", "/v1/chat/completions"
PATHS = {"metrics": "/metrics", "next stream": STREAM_PATH}


class Context(NamedTuple):
    """A pooled request/response object. `holder` is who may use it: nobody ("") while it lies in the pool."""

    holder: str = ""
    path: str = ""
    status: int = 200


class PooledResponse(Model):
    """A streaming task reports on a request object that the pool has given to somebody else."""

    owned: bool = parameter(False, help="the streaming task owns its inputs by value")
    frames: int = parameter(2, help="frames of the stream")

    objects: tuple[Context, ...] = ()
    pool: tuple[int, ...] = ()
    task_holds: int | None = None
    client_left: bool = False
    engine_failed: bool = False
    choice_missing: bool = False
    stream_ends: tuple[str, ...] = ()
    answers: tuple[tuple[str, int], ...] = ()
    crossed: frozenset[str] = frozenset()

    @process
    def handler(self) -> Steps:
        yield "takes an object, starts the task"
        mine = self.task_holds = self._take(STREAM, STREAM_PATH)
        yield "returns: its object goes to the pool"
        self._give_back(mine)

    @process
    def streaming_task(self) -> Steps:
        yield "starts", lambda: self.task_holds is not None
        sent = 0
        while sent < self.frames:
            yield "writes a frame"
            if self.engine_failed or self.client_left:
                yield from self._report(MID_STREAM_ERROR if self.engine_failed else FAILED_WRITE)
                return
            sent += 1
        yield "looks at the last choice"
        if self.choice_missing:
            yield from self._report(MISSING_CHOICE)
            return
        yield "writes the terminator"
        self.stream_ends += ("done",)

    @process(*PATHS)
    def bystander(self, name: str) -> Steps:
        yield "takes an object"
        mine = self._take(name, PATHS[name])
        yield "is routed by its path"
        if self.objects[mine].path != PATHS[name]:
            self._write(mine, self.objects[mine]._replace(status=404))
        yield "answers with its status"
        self.answers += ((name, self.objects[mine].status),)
        self._give_back(mine)

    @process(fault=True)
    def client(self) -> Steps:
        yield "leaves"
        self.client_left = True

    @process(fault=True)
    def engine(self) -> Steps:
        yield "fails in mid-stream"
        self.engine_failed = True

    @process(fault=True)
    def engine_result(self) -> Steps:
        yield "ends without a choice"
        self.choice_missing = True

    @always(Invariant(10, "a failed write is never reported on a recycled object"))
    def no_failed_write(self) -> bool:
        return FAILED_WRITE not in self.crossed

    @always(Invariant(11, "an error in mid-stream is never reported on a recycled object"))
    def no_mid_stream_error(self) -> bool:
        return MID_STREAM_ERROR not in self.crossed

    @always(Invariant(12, "a missing choice is never reported on a recycled object"))
    def no_missing_choice(self) -> bool:
        return MISSING_CHOICE not in self.crossed

    @always(Invariant(13, "a bystander gets its own answer"))
    def own_answer(self) -> bool:
        return all(status == 200 for _name, status in self.answers)

    @always(ENDS_ONCE)
    def ends_once(self) -> bool:
        return len(self.stream_ends) <= 1 and len({name for name, _status in self.answers}) == len(self.answers)

    @eventually(PROGRESS)
    def everybody_ends(self) -> bool:
        return len(self.stream_ends) == 1 and len(self.answers) == len(PATHS)

    def _report(self, reason: str) -> Steps:
        yield f"reports: {reason}"
        self.stream_ends += (reason,)
        held = self.task_holds
        if self.owned or held is None:
            return
        holder = self.objects[held].holder
        if holder not in ("", STREAM):
            self.crossed |= {reason}
        self._write(held, self.objects[held]._replace(path="/stale", status=500))

    def _take(self, holder: str, path: str) -> int:
        """The last object given back, or a new one."""
        fresh = Context(holder, path)
        if not self.pool:
            self.objects += (fresh,)
            return len(self.objects) - 1
        *rest, taken = self.pool
        self.pool = tuple(rest)
        self._write(taken, fresh)
        return taken

    def _give_back(self, number: int) -> None:
        self._write(number, self.objects[number]._replace(holder=""))
        self.pool += (number,)

    def _write(self, number: int, context: Context) -> None:
        self.objects = (*self.objects[:number], context, *self.objects[number + 1 :])
