"""vLLM #32255 and its mirror (vLLM reference, entry 37): an abort while a remote read writes into the request's blocks.

The scheduler frees the blocks of an aborted request; the worker goes on reading into them, and whoever has been given them in
the meantime gets somebody else's KV. The cure keeps the blocks until the worker reports the end of the read. Review found the
other side: if that report has been taken already when the abort looks for it, nobody frees any more.
"""

from windtunnel.explore import PROGRESS, Invariant, Model, Steps, always, eventually, parameter, process

FREE, LOADING, LOADED, ORPHAN, OTHER = "free", "loading", "loaded", "orphan", "other"


class RemoteLoad(Model):
    """An abort during a remote load: the transfer writes into somebody else's block, or its block is never freed."""

    waits: bool = parameter(False, help="an aborted request's block stays until the read has ended")
    looks: bool = parameter(True, help="the abort asks whether the end of the read has been reported already")

    owner: str = LOADING
    """Who has the block."""
    reading: bool = True
    reported: bool = False
    """The worker's report of the end waits to be taken."""
    aborted: bool = False
    request_ended: bool = False
    content: str = ""

    @process
    def worker(self) -> Steps:
        yield "the read lands"
        self.content = LOADING
        self.reading = False
        yield "reports its end"
        self.reported = True

    @process
    def scheduler(self) -> Steps:
        yield "takes the report", lambda: self.reported
        self.reported = False
        if self.owner == LOADING:
            self.owner = LOADED
        elif self.owner == ORPHAN:
            self.owner = FREE
        yield "the request runs on, or is aborted", lambda: self.owner == LOADED or self.aborted
        if self.owner == LOADED and not self.aborted:
            self.owner, self.request_ended = FREE, True

    @process(fault=True)
    def client(self) -> Steps:
        yield "looks at the request, and leaves"
        loaded, ended = self.owner == LOADED, self.request_ended
        yield "aborts"
        if ended or self.request_ended:
            return
        self.aborted = self.request_ended = True
        loaded = self.owner == LOADED if self.looks else loaded
        self.owner = ORPHAN if self.waits and not loaded else FREE

    @process
    def bystander(self) -> Steps:
        yield "is given the free block", lambda: self.owner == FREE
        self.owner, self.content = OTHER, OTHER
        yield "reads what it has computed"
        assert self.content == OTHER, "a block's content is its owner's"

    @always(Invariant(10, "no transfer writes into a block of another owner"))
    def own_block(self) -> bool:
        return not (self.reading and self.owner == OTHER)

    @eventually(PROGRESS)
    def block_goes_on(self) -> bool:
        return self.owner == OTHER and self.request_ended
