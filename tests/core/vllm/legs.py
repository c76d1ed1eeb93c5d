"""What the random machines of both connectors share: requests with two legs, wires whose faults take turns, what must hold."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tests.core.rig import request
from tests.core.vllm.kv_rig import Node, Pair

from windtunnel.core.lifecycle import State
from windtunnel.core.request import EngineRequest
from windtunnel.core.transfer.backends import Fate, Write

MAX_LEN = 144


class Legs(Protocol):
    """One request."""

    @property
    def prompt(self) -> int: ...

    @property
    def shared(self) -> int:
        """The first tokens of its prompt that others begin with, too."""
        ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def children(self) -> int: ...


class Engines(Protocol):
    """Both engines, and the wires. Wishes are taken in turn, so a run is a function of them."""

    @property
    def seqs(self) -> int: ...

    @property
    def budget(self) -> int: ...

    @property
    def caching(self) -> bool: ...

    @property
    def late_aborts(self) -> bool:
        """Asynchronous scheduling."""
        ...

    @property
    def fates(self) -> tuple[str, ...]: ...

    @property
    def lost(self) -> tuple[bool, ...]: ...

    @property
    def delays(self) -> tuple[int, ...]: ...


class LegMachine:
    """Drives legs through a pair, which is its subclass's to make. Owned by one run."""

    pair: Pair

    def __init__(self, setting: Engines, legs: Sequence[Legs]) -> None:
        self._engines = setting
        self._legs = legs
        self._turns: Counter[str] = Counter()
        self.aborted: set[str] = set()

    @property
    def engine_config(self) -> dict[str, Any]:
        told = self._engines
        return {
            "max_model_len": MAX_LEN, "block_size": 16, "max_num_seqs": told.seqs, "max_num_batched_tokens": told.budget,
            "enable_prefix_caching": told.caching, "async_scheduling": told.late_aborts,
        }  # fmt: skip

    # The wires

    def turn(self, name: str) -> Any:
        self._turns[name] += 1
        wishes: tuple[Any, ...] = getattr(self._engines, name)
        return wishes[self._turns[name] % len(wishes)]

    def fate(self, _write: Write) -> Fate:
        return Fate(self.turn("fates"), 3_000)

    # The legs

    def later(self, at_ns: int, what: Callable[[], None]) -> None:
        self.pair._post(max(0, at_ns - self.pair.now_ns), what)

    def requests(
        self, name: str, leg: Legs, side: str, params: Mapping[str, Any] | None, max_tokens: int
    ) -> list[EngineRequest]:
        shared = tuple(range(leg.shared))[: leg.prompt - 1]
        tokens = shared + request(name, leg.prompt).prompt_token_ids[len(shared) :]
        ids = [f"{name}-{side}"] if leg.children == 1 else [f"{child}_{name}-{side}" for child in range(leg.children)]
        source = request(name).source
        return [request(one, tokens, max_tokens, source=source, kv_transfer=params) for one in ids]

    def abort(self, node: Node, ids: Iterable[str]) -> None:
        ids = tuple(ids)
        self.aborted.update({view.request_id for view in node.engine.live()}.intersection(ids))
        self.pair.abort(node, *ids)
        node.engine.check_integrity()

    # Looking back

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.pair.p, self.pair.d

    def story(self) -> list[Any]:
        """Everything that was seen, to be compared."""
        steps: list[Any] = [
            (node.name, step.at_ns, step.outputs, step.transitions, step.stats) for node in self.nodes for step in node.steps
        ]
        return [*steps, *(dict(node.counters) for node in self.nodes)]

    def bones(self) -> list[Any]:
        """Every step without its tokens."""
        return [(node.name, step.at_ns, step.transitions, step.stats) for node in self.nodes for step in node.steps]

    def check_ends(self) -> None:
        """Every sequence ends exactly once, and an abort ends it for good."""
        for node in self.nodes:
            ends = Counter(one.request_id for step in node.steps for one in step.transitions if one.after.terminal)
            starts = Counter(one.request_id for step in node.steps for one in step.transitions if one.before is State.NEW)
            assert ends == starts and set(ends.values()) <= {1}
            assert not node.engine.live(), "somebody waits for ever"
            assert not (node.finish.keys() & self.aborted), "an aborted request was finished"

    def wanted(self, request_id: str) -> tuple[str, int]:
        """Of a decode's request: its name, and how many tokens it must have."""
        name = request_id.rpartition("_")[2].removesuffix("-d")
        leg = self._legs[int(name[1:])]
        return name, min(leg.max_tokens, MAX_LEN - leg.prompt)
