"""Routing policies: which engine gets the next request.

A policy is any object with the two methods of `Policy`. A policy file is a Python file with a function
`make_policy(context: PolicyContext) -> Policy`.
"""

import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol, runtime_checkable

from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from windtunnel.core.request import EngineRequest
from windtunnel.sim.scenario import ScenarioError


@dataclass(slots=True)
class EngineState:
    """What a router knows of one engine. Owned by the router; policies read it."""

    index: int
    role: str
    healthy: bool = True
    in_flight: int = 0
    """Requests sent there and not yet ended, as the router sees it."""
    in_flight_tokens: int = 0
    """Prompt tokens of those."""
    place: int = 0
    """Its number among the engines of its role."""


class PrefixHasher(Protocol):
    """Hashes the blocks (pages) of a prompt as the engines' KV events name them."""

    @property
    def block_size(self) -> int: ...

    def in_parts(self, request: EngineRequest, blocks_at_once: int) -> Iterator[list[bytes]]:
        """The hashes of all full blocks, the same list growing."""
        ...


class Policy(Protocol):
    """`choose` gets the engines that are healthy and whose role fits, never none of them, in index order."""

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState: ...

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        """What the cache of `engine` has gained and lost, one network delay ago."""
        ...


@runtime_checkable
class PairPolicy(Protocol):
    """A policy for prefill and decode workers that chooses both at once. Any other policy is made once for each role."""

    def choose_pair(
        self, request: EngineRequest, prefills: Sequence[EngineState], decodes: Sequence[EngineState]
    ) -> tuple[EngineState, EngineState]: ...

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may use. `hasher` hashes blocks as the engines do; `draws` is the policy's own seeded generator."""

    draws: Random
    hasher: PrefixHasher
    engines: int
    role: str = "unified"
    """What it chooses: `unified`, `prefill`, `decode`, or `pair`."""


class _WithoutCache:
    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        return


class RoundRobin(_WithoutCache):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        """The next one by index, whoever is missing."""
        chosen = next((engine for engine in engines if engine.index >= self._next), engines[0])
        self._next = chosen.index + 1
        return chosen


class Uniform(_WithoutCache):
    def __init__(self, draws: Random) -> None:
        self._draws = draws

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        return self._draws.choice(engines)


class LeastLoad(_WithoutCache):
    """Fewest requests in flight; the lowest index among equals."""

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        return min(engines, key=_load)


class PowerOfTwo(_WithoutCache):
    """The less loaded of two drawn ones (Mitzenmacher 2001)."""

    def __init__(self, draws: Random) -> None:
        self._draws = draws

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        return min(self._draws.choices(engines, k=2), key=_load)


class SessionAffinity(_WithoutCache):
    """A session stays where it was while that engine is healthy; a new one goes to the least loaded. At most LIMIT sessions."""

    LIMIT = 1 << 17

    def __init__(self) -> None:
        self._home: dict[str, int] = {}

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        session = request.session_id
        home = None if session is None else self._home.pop(session, None)
        chosen = next((engine for engine in engines if engine.index == home), None) or min(engines, key=_load)
        if session is not None:
            self._home[session] = chosen.index
            if len(self._home) > self.LIMIT:
                del self._home[next(iter(self._home))]
        return chosen


class PrefixAware:
    """The engine with the longest cached prefix, as its KV events tell, unless the cluster is out of balance.

    Out of balance: the fullest engine has more than `GAP` requests more than the emptiest and more than `RATIO` times as
    many; then the least loaded is chosen.
    """

    GAP, RATIO = 16, 1.5

    def __init__(self, hasher: PrefixHasher) -> None:
        self._hasher = hasher
        self._holders: dict[bytes, set[int]] = {}
        self._held: dict[int, set[bytes]] = {}

    def choose(self, request: EngineRequest, engines: Sequence[EngineState]) -> EngineState:
        loads = [engine.in_flight for engine in engines]
        if max(loads) - min(loads) > self.GAP and max(loads) > self.RATIO * min(loads):
            return min(engines, key=_load)
        depth = self._depths(request)
        return min(engines, key=lambda engine: (-depth.get(engine.index, 0), engine.in_flight, engine.index))

    def _depths(self, request: EngineRequest) -> dict[int, int]:
        """How many leading blocks of the prompt each engine holds. Hashes only as far as anybody holds them."""
        depth: dict[int, int] = {}
        candidates: set[int] | None = None
        for hashes in self._hasher.in_parts(request, 1):
            holders = self._holders.get(hashes[-1], set())
            candidates = set(holders) if candidates is None else candidates & holders
            if not candidates:
                break
            depth.update(dict.fromkeys(candidates, len(hashes)))
        return depth

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        held = self._held.setdefault(engine, set())
        for event in events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
                for digest in event.block_hashes:
                    self._holders.setdefault(digest, set()).add(engine)
            elif isinstance(event, BlockRemoved):
                self._forget(engine, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._forget(engine, tuple(held))

    def _forget(self, engine: int, hashes: Sequence[bytes]) -> None:
        self._held[engine].difference_update(hashes)
        for digest in hashes:
            holders = self._holders.get(digest)
            if holders is not None:
                holders.discard(engine)
                if not holders:
                    del self._holders[digest]


class PdPairs(_WithoutCache):
    """Fixed pairs: a prefill worker always sends to the same decode worker. The pair with the fewest requests is chosen.

    The larger side shares its partners: prefill i goes with decode i modulo their number, and the other way round.
    """

    def __init__(self, prefills: int, decodes: int) -> None:
        self._pairs = [(at % prefills, at % decodes) for at in range(max(prefills, decodes))]

    def choose_pair(
        self, request: EngineRequest, prefills: Sequence[EngineState], decodes: Sequence[EngineState]
    ) -> tuple[EngineState, EngineState]:
        """A pair whose members are both healthy; without one, the least loaded of each role."""
        by_place = {state.place: state for state in prefills}, {state.place: state for state in decodes}
        pairs = [(by_place[0][left], by_place[1][right]) for left, right in self._pairs if _both(by_place, left, right)]
        if not pairs:
            return min(prefills, key=_load), min(decodes, key=_load)
        return min(pairs, key=lambda pair: (pair[0].in_flight + pair[1].in_flight, pair[0].index, pair[1].index))


def _both(by_place: tuple[dict[int, EngineState], dict[int, EngineState]], left: int, right: int) -> bool:
    return left in by_place[0] and right in by_place[1]


class PerRole:
    """A policy of its own for each role."""

    def __init__(self, prefill: Policy, decode: Policy, roles: Sequence[str]) -> None:
        self._by_role = {"prefill": prefill, "decode": decode}
        self._roles = roles

    def choose_pair(
        self, request: EngineRequest, prefills: Sequence[EngineState], decodes: Sequence[EngineState]
    ) -> tuple[EngineState, EngineState]:
        return self._by_role["prefill"].choose(request, prefills), self._by_role["decode"].choose(request, decodes)

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        self._by_role[self._roles[engine]].on_kv_events(engine, events)


def _load(engine: EngineState) -> tuple[int, int, int]:
    return (engine.in_flight, engine.in_flight_tokens, engine.index)


BUILT_IN: Mapping[str, Callable[[PolicyContext], Policy]] = {
    "round-robin": lambda _context: RoundRobin(),
    "random": lambda context: Uniform(context.draws),
    "least-load": lambda _context: LeastLoad(),
    "power-of-two": lambda context: PowerOfTwo(context.draws),
    "prefix-aware": lambda context: PrefixAware(context.hasher),
    "session-affinity": lambda _context: SessionAffinity(),
}
NEED_KV_EVENTS = frozenset({"prefix-aware"})


PAIRS = "pd-pairs"


def load_policy(name: str, file: str | None, context: PolicyContext) -> Policy:
    """Raises ScenarioError for a file without `make_policy`, or whose policy has not the methods of `Policy`."""
    if file is None:
        if name not in BUILT_IN:
            raise ScenarioError(f"policy is {name!r}: must be one of {', '.join(BUILT_IN)}")
        return BUILT_IN[name](context)
    policy: Policy = _from_file(file, context)
    _has_methods(file, policy, ("choose", "on_kv_events"))
    return policy


def load_pair_policy(name: str, file: str | None, context: PolicyContext, roles: Sequence[str]) -> PairPolicy:
    """The same for prefill and decode workers."""
    if file is None and name == PAIRS:
        return PdPairs(roles.count("prefill"), roles.count("decode"))
    if file is not None:
        made = _from_file(file, replace(context, role="pair"))
        if isinstance(made, PairPolicy):
            return made
    prefill, decode = (load_policy(name, file, replace(context, role=role)) for role in ("prefill", "decode"))
    return PerRole(prefill, decode, roles)


def _from_file(file: str, context: PolicyContext) -> Any:
    if not Path(file).is_file():
        raise ScenarioError(f"policy_file {file} does not exist")
    make = runpy.run_path(file).get("make_policy")
    if not callable(make):
        raise ScenarioError(f"policy_file {file} has no function make_policy(context)")
    return make(context)


def _has_methods(file: str, policy: object, names: Sequence[str]) -> None:
    for method in names:
        if not callable(getattr(policy, method, None)):
            raise ScenarioError(f"policy_file {file}: what make_policy returned has no method {method}")
