"""What waits for a slow reader, and load reports, without a socket."""

import asyncio

import pytest

from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.core.units import S
from windtunnel.serve.config import UsageError
from windtunnel.serve.fetched import BACKLOG_MAX, FetchedAnswer
from windtunnel.serve.flags import parse_args
from windtunnel.serve.loads import LoadObserver
from windtunnel.wire.family import Delta, SamplingPlan, Usage, WireError
from windtunnel.wire.output import ChoiceState

TOKENIZER = BuiltinTokenizer()
FIRST = 400


def fetched(choices: int = 1) -> tuple[FetchedAnswer, list[ChoiceState]]:
    states = [ChoiceState(at, 0, SamplingPlan(max_tokens=10_000), TOKENIZER, keep=False) for at in range(choices)]
    return FetchedAnswer(states, Usage(1, 0), asyncio.get_running_loop()), states


def token(number: int, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r", (FIRST + number,), finish)


async def drained(answer: FetchedAnswer) -> list[Delta]:
    out = []
    while await answer.more():
        while (delta := answer.take()) is not None:
            out.append(delta)
    return out


async def test_a_reader_that_keeps_pace_gets_every_output_by_itself() -> None:
    answer, (choice,) = fetched()
    reader = asyncio.create_task(drained(answer))
    for number in range(10):
        answer.on_output(choice, token(number, FinishReason.LENGTH if number == 9 else None))
        await asyncio.sleep(0)
    assert [delta.token_ids for delta in await reader] == [(FIRST + number,) for number in range(10)]


async def test_a_slow_reader_gets_everything_in_a_bounded_number_of_deltas() -> None:
    answer, (first, second) = fetched(2)
    for number in range(1000):
        answer.on_output(first, token(number, FinishReason.LENGTH if number == 999 else None))
        if number % 3 == 0:
            answer.on_output(second, token(number, FinishReason.LENGTH if number == 999 else None))
    deltas = await drained(answer)
    assert len(deltas) <= BACKLOG_MAX + 2
    for index, step in ((0, 1), (1, 3)):
        own = [delta for delta in deltas if delta.index == index]
        assert [at for delta in own for at in delta.token_ids] == [FIRST + number for number in range(0, 1000, step)]
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]


async def test_a_reader_that_catches_up_in_between_sees_the_order_of_the_engine() -> None:
    answer, (choice,) = fetched()
    seen: list[int] = []
    for number in range(500):
        answer.on_output(choice, token(number))
        if number % 70 == 69:
            for _ in range(40):
                delta = answer.take()
                seen += () if delta is None else delta.token_ids
    answer.on_output(choice, token(500, FinishReason.STOP))
    seen += [at for delta in await drained(answer) for at in delta.token_ids]
    assert seen == [FIRST + number for number in range(501)]


async def test_what_waits_is_delivered_before_an_error_and_nothing_after_it() -> None:
    answer, (choice,) = fetched()
    answer.on_output(choice, token(0))
    answer.fail(WireError("broken", 500))
    answer.on_output(choice, token(1))
    assert [delta.token_ids for delta in await drained(answer)] == [(FIRST,)]
    assert answer.error is not None


def step(tokens: int, *, running: int = 1, waiting: int = 0, queries: int = 0, hits: int = 0) -> StepOutput:
    stats = StepStats(running, waiting, 1, 0.25, prefix_queries=queries, prefix_hits=hits)
    return StepOutput(0, outputs=[token(number) for number in range(tokens)], stats=stats)


def test_throughput_is_over_the_last_two_seconds() -> None:
    loads = LoadObserver()
    for at in range(40):
        loads.on_step(0, step(5), at * S // 10)
    ((_, report),) = loads.reports(4 * S)
    assert report.tokens_per_s == 5 * 20 / 2
    ((_, later),) = loads.reports(7 * S)
    assert later.tokens_per_s == 0
    assert (later.running, later.waiting, later.kv_usage) == (1, 1, 0.25)


def test_each_rank_has_its_own_report_and_rank_0_always_has_one() -> None:
    loads = LoadObserver()
    assert [rank for rank, _ in loads.reports(0)] == [0]
    loads.on_step(1, step(1, running=3, waiting=4, queries=100, hits=40), 0)
    (_, first), (_, second) = loads.reports(0)
    assert (first.running, first.waiting, first.hit_rate) == (0, 0, 0)
    assert (second.running, second.waiting, second.hit_rate) == (3, 5, 0.4)


def test_the_flags_of_grpc() -> None:
    assert parse_args(["m"]).config.grpc_port is None
    assert parse_args(["m", "--grpc"]).config.grpc_port == 50051
    assert parse_args(["m", "--no-grpc"]).config.grpc_port is None
    assert parse_args(["m", "--grpc-port", "0"]).config.grpc_port == 0
    assert parse_args(["m", "--engine", "sglang", "--grpc-port", "7"]).config.grpc_port == 7
    with pytest.raises(UsageError, match="grpc-port"):
        parse_args(["m", "--grpc-port", "70000"])
