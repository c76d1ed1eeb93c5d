"""The queues of the vLLM scheduler, lazy and heap-based, against naive lists."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rig import lora, request

from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.queues import DeferredSet, ReadyTimes, WaitingQueue, fcfs_rank, priority_rank
from windtunnel.core.vllm.sequence import VllmSequence

CONFIG = VllmEngineConfig()


def sequence(number: int, priority: int = 0, adapter: str | None = None) -> VllmSequence:
    asked = request(f"r{number}", 4, priority=priority, lora=lora(adapter) if adapter else None)
    return VllmSequence(asked, CONFIG, number, 0)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(["push", "take", "remove"]), st.integers(0, 5)), max_size=300))
def test_the_waiting_queue_is_a_sorted_list(by_priority: bool, moves: list[tuple[str, int]]) -> None:
    rank = priority_rank if by_priority else fcfs_rank
    queue, naive = WaitingQueue(rank), list[VllmSequence]()
    for number, (move, choice) in enumerate(moves):
        if move == "push":
            one = sequence(number, choice)
            queue.push(one)
            naive.append(one)
            naive.sort(key=rank)
        elif naive:
            one = naive[0] if move == "take" else naive[choice % len(naive)]
            assert move != "take" or queue.peek() is one
            queue.remove(one)
            naive.remove(one)
        assert len(queue) == len(naive)
        assert queue.in_order() == naive
        assert not naive or queue.peek() is naive[0]


DEFERRALS = st.lists(
    st.tuples(st.sampled_from(["until", "lora", "remove", "due", "slots"]), st.integers(0, 20), st.sampled_from("xyz")),
    max_size=120,
)


@settings(max_examples=100, deadline=None)
@given(DEFERRALS)
def test_the_deferred_set_is_a_list_of_reasons(moves: list[tuple[str, int, str]]) -> None:
    deferred, naive = DeferredSet(), list[tuple[VllmSequence, Any]]()
    for number, (move, value, adapter) in enumerate(moves):
        if move == "until":
            one = sequence(number)
            deferred.add_until(one, value)
            naive.append((one, value))
        elif move == "lora":
            one = sequence(number, adapter=adapter)
            deferred.add_for_lora(one, lora(adapter).lora_id)
            naive.append((one, adapter))
        elif move == "remove" and naive:
            deferred.remove(naive.pop(value % len(naive))[0])
        elif move == "due":
            due = sorted((entry for entry in naive if isinstance(entry[1], int) and entry[1] <= value), key=_by_time)
            assert deferred.take_due(value) == [one for one, _until in due]
            naive = [entry for entry in naive if entry not in due]
        elif move == "slots":
            naive = _slots(deferred, naive, {lora(adapter).lora_id}, value % 4)
        assert deferred.in_order() == [one for one, _reason in naive]
        times = [reason for _one, reason in naive if isinstance(reason, int)]
        assert deferred.next_at() == min(times, default=None)


def _by_time(entry: tuple[VllmSequence, Any]) -> tuple[int, int]:
    return entry[1], entry[0].arrived


def _slots(
    deferred: DeferredSet, naive: list[tuple[VllmSequence, Any]], running: set[int], slots: int
) -> list[tuple[VllmSequence, Any]]:
    allowed = set(running)
    waiting = list(dict.fromkeys(reason for _one, reason in naive if isinstance(reason, str)))
    taken = []
    for adapter in waiting:
        if lora(adapter).lora_id in allowed or len(allowed) < slots:
            allowed.add(lora(adapter).lora_id)
            taken += [one for one, reason in naive if reason == adapter]
    assert deferred.take_for_loras(running, slots) == taken
    return [entry for entry in naive if entry[0] not in taken]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=100))
def test_ready_times_are_a_sorted_list(moves: list[tuple[int, int]]) -> None:
    """Each place is entered again after it was taken, as the scheduler does; some leave meanwhile."""
    ready, running, naive = ReadyTimes(), dict[int, VllmSequence](), dict[int, int]()
    now_ns = 0
    for place, (later, leaves) in enumerate(moves):
        running[place] = sequence(place)
        naive[place] = now_ns + later
        ready.push(now_ns + later, place, now_ns)
        if leaves == 0 and running:
            gone = min(running)
            del running[gone], naive[gone]
        now_ns += later // 3
        expected = sorted(order for order, at_ns in naive.items() if at_ns <= now_ns)
        next_ns = ready.next_at(running)
        assert (next_ns is None) == (not naive)
        assert next_ns is None or max(next_ns, now_ns) == max(min(naive.values()), now_ns)
        assert ready.take_due(now_ns, running) == [running[order] for order in expected]
        for order in expected:
            naive[order] = now_ns + 1 + order % 5
            ready.push(naive[order], order, now_ns)
