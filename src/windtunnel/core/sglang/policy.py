"""The order of the waiting queue: `--schedule-policy` (SGLang reference §9), one function for each name."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from windtunnel.core.sglang.memory import KvMemory
from windtunnel.core.sglang.radix import RadixNode
from windtunnel.core.sglang.sequence import SglangSequence

LPM_LIMIT = 128
"""With more sequences waiting, `lpm` is as `fcfs`: matching all of them would cost more than it gains."""


class Chance(Protocol):
    """What the `random` policy needs of a seeded generator; `random.Random(seed)` is one."""

    def random(self) -> float: ...


class Scene(NamedTuple):
    """What a policy may look at."""

    waiting: list[SglangSequence]
    """In order of arrival."""
    running: Iterable[SglangSequence]
    memory: KvMemory
    now_ns: int
    chance: Chance
    low_priority_first: bool


Order = Callable[[Scene], list[SglangSequence]]


def _fcfs(scene: Scene) -> list[SglangSequence]:
    return scene.waiting


def _lpm(scene: Scene) -> list[SglangSequence]:
    if len(scene.waiting) > LPM_LIMIT:
        return scene.waiting
    return sorted(scene.waiting, key=lambda sequence: -scene.memory.prefix_tokens(sequence))


def _random(scene: Scene) -> list[SglangSequence]:
    draws = [(scene.chance.random(), at) for at in range(len(scene.waiting))]
    return [scene.waiting[at] for _draw, at in sorted(draws)]


def _dfs_weight(scene: Scene) -> list[SglangSequence]:
    """Depth first through the tree, at each node the child below which most requests wait."""
    ends: dict[RadixNode, list[SglangSequence]] = {}
    tree = scene.memory.tree
    for sequence in scene.waiting:
        node = tree.match(sequence.tokens(sequence.num_tokens - 1), sequence.namespace).node
        ends.setdefault(node, []).append(sequence)
    weights: Counter[RadixNode] = Counter()
    children: dict[RadixNode, dict[RadixNode, None]] = {}
    roots: dict[RadixNode, None] = {}
    for node, sequences in ends.items():
        _weigh(node, len(sequences), weights, children, roots)
    order: list[SglangSequence] = []
    stack = sorted(roots, key=lambda node: weights[node])
    while stack:
        node = stack.pop()
        order += ends.get(node, ())
        stack += sorted(children.get(node, ()), key=lambda child: weights[child])
    return order


def _weigh(
    node: RadixNode,
    weight: int,
    weights: Counter[RadixNode],
    children: dict[RadixNode, dict[RadixNode, None]],
    roots: dict[RadixNode, None],
) -> None:
    while True:
        weights[node] += weight
        if node.parent is None:
            roots[node] = None
            return
        children.setdefault(node.parent, {})[node] = None
        node = node.parent


def _lof(scene: Scene) -> list[SglangSequence]:
    return sorted(scene.waiting, key=lambda sequence: -sequence.output_limit)


def _priority(scene: Scene) -> list[SglangSequence]:
    sign = 1 if scene.low_priority_first else -1
    return sorted(scene.waiting, key=lambda sequence: sign * sequence.request.priority)


def _routing_key(scene: Scene) -> list[SglangSequence]:
    """First the keys that most running requests have; those without a running one keep their order."""
    counts = Counter(sequence.request.routing_key for sequence in scene.running if sequence.request.routing_key)

    def rank(sequence: SglangSequence) -> tuple[int, str]:
        key = sequence.request.routing_key or ""
        return (-counts[key], key) if counts[key] else (0, "")

    return sorted(scene.waiting, key=rank)


def _hrrn(scene: Scene) -> list[SglangSequence]:
    """Highest response ratio next: (waiting + service) / service, with the uncached prompt as the service time in µs."""

    def ratio(sequence: SglangSequence) -> float:
        service = max(1, sequence.num_tokens - scene.memory.prefix_tokens(sequence)) * 1000
        return 1 + (scene.now_ns - sequence.queued_ns) / service

    return sorted(scene.waiting, key=lambda sequence: -ratio(sequence))


def _shortest_prefill_first(scene: Scene) -> list[SglangSequence]:
    return sorted(scene.waiting, key=lambda sequence: sequence.num_tokens - scene.memory.prefix_tokens(sequence))


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "fcfs": _fcfs,
        "lpm": _lpm,
        "random": _random,
        "dfs-weight": _dfs_weight,
        "lof": _lof,
        "priority": _priority,
        "routing-key": _routing_key,
        "hrrn": _hrrn,
        "shortest-prefill-first": _shortest_prefill_first,
    }
)
