"""vLLM #53936 (vLLM reference, entry 13): admission of the n children of one request is not atomic.

The capacity of the queue is checked once; then each child is registered, with an await in between. Another request can take
the places meanwhile: the request is answered 503 although some of its children run, for nobody.
"""

from windtunnel.explore import Invariant, Model, Steps, always, parameter, process

LIMIT = 3
CHILDREN = 2


class NAdmission(Model):
    """Two requests of two children each are admitted to a queue with three places, child by child."""

    fixed: bool = parameter(False, help="all children are registered in the step that checks the limit")

    queued: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()

    @process("first", "second")
    def request(self, name: str) -> Steps:
        yield "checks the limit of the queue"
        if len(self.queued) + CHILDREN > LIMIT:
            self.refused |= {name}
            return
        child = 0
        while child < CHILDREN and name not in self.refused:
            if not self.fixed:
                yield f"registers child {child}"
            if len(self.queued) < LIMIT:
                self.queued += (name,)
            else:
                self.refused |= {name}
            child += 1

    @always(Invariant(10, "a refused request has no child in the queue"))
    def all_or_none(self) -> bool:
        return not self.refused & set(self.queued)

    @always(Invariant(11, "the limit of the queue holds"))
    def limit_holds(self) -> bool:
        return len(self.queued) <= LIMIT
