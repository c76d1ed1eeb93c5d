"""Each request API, from the bytes of its answers to storms against simulated servers that speak it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.test_client import DONE, END, HEAD, chunked, plain, sends

from windtunnel.core.units import MS, S
from windtunnel.lab.arms import running
from windtunnel.lab.client import run_request
from windtunnel.lab.connection import How
from windtunnel.lab.experiment_file import Arm
from windtunnel.lab.findings import find
from windtunnel.lab.links import request_body
from windtunnel.lab.plan import Api, Moment, PlanError, Role, Shape, StormPlan, Trigger, check_plan
from windtunnel.lab.record import Ask, End, StreamRecord
from windtunnel.lab.session import Session
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import Target, make_target


def events(*payloads: dict[str, object] | bytes) -> list[bytes]:
    return [one if isinstance(one, bytes) else b"event: x\ndata: " + json.dumps(one).encode() + b"\n\n" for one in payloads]


def said(text: str, reason: str | None = None, **more: object) -> dict[str, object]:
    return {"text": text, "meta_info": {"id": "r1", "finish_reason": {"type": reason} if reason else None}, **more}


GENERATE = events(said(" acorn"), said(" acorn actor", "length"), DONE)
TWICE = events(
    said(" acorn", output_ids=[1]) | {"meta_info": {"completion_tokens": 1}},
    said(" acorn", output_ids=[1]) | {"meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}},
    DONE,
)
"""Deltas, and the same word twice."""
DELTAS = events(said(" acorn"), said(" actor", "length"), DONE)
MESSAGES = events(
    {"type": "message_start", "message": {"id": "r1", "content": []}},
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " acorn"}, "index": 0},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " actor"}, "index": 0},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
    {"type": "message_stop"},
)
RESPONSES = events(
    {"type": "response.created", "response": {"id": "r1", "status": "in_progress", "error": None}},
    {"type": "response.output_text.delta", "delta": " acorn"},
    {"type": "response.output_text.delta", "delta": " actor"},
    {"type": "response.output_text.done", "text": " acorn actor"},
    {"type": "response.incomplete", "response": {"id": "r1", "status": "incomplete"}},
)


async def ask_once(api: Api, answer: bytes, *, stream: bool = True, n: int = 1) -> StreamRecord:
    async with sends(answer) as target:
        return await run_request(Session(target, 5 * S, 0), Ask(1, Role.LATER, 0, api, "[wt:1]", 2, stream, n))


@pytest.mark.parametrize(
    ("api", "frames", "reason"),
    [
        (Api.GENERATE, GENERATE, "length"),
        (Api.GENERATE, DELTAS, "length"),
        (Api.MESSAGES, MESSAGES, "max_tokens"),
        (Api.RESPONSES, RESPONSES, "incomplete"),
    ],
)
async def test_a_whole_stream(api: Api, frames: list[bytes], reason: str) -> None:
    record = await ask_once(api, HEAD + chunked(*frames) + END)
    assert (record.end, record.words, record.finish_reason) == (End.FINISHED, ("acorn", "actor"), reason)
    assert len(record.frame_ns) == 2
    cut = await ask_once(api, HEAD + chunked(*frames[:-1]) + END)
    assert cut.end is End.UNTERMINATED


async def test_the_same_word_twice_is_two_words() -> None:
    assert (await ask_once(Api.GENERATE, HEAD + chunked(*TWICE) + END)).words == ("acorn", "acorn")


@pytest.mark.parametrize(
    ("api", "frames"),
    [
        (Api.GENERATE, events({"error": {"message": "no"}}, DONE)),
        (Api.MESSAGES, events({"type": "error", "error": {"type": "api_error", "message": "no"}})),
        (Api.RESPONSES, events({"type": "error", "code": "500", "message": "no"})),
        (Api.RESPONSES, events({"type": "response.failed", "response": {"status": "failed", "error": {"message": "no"}}})),
    ],
)
async def test_an_error_inside_a_stream(api: Api, frames: list[bytes]) -> None:
    record = await ask_once(api, HEAD + chunked(*frames) + END)
    assert record.end is End.ERROR_FRAME
    assert '"no"' in (record.error or "")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.GENERATE, said(" acorn actor", "length")),
        (Api.MESSAGES, {"id": "r1", "content": [{"type": "text", "text": " acorn actor"}], "stop_reason": "end_turn"}),
        (
            Api.RESPONSES,
            {
                "status": "completed",
                "output": [{"type": "message", "content": [{"type": "output_text", "text": " acorn actor"}]}],
            },
        ),
    ],
)
async def test_a_whole_answer(api: Api, body: dict[str, object]) -> None:
    record = await ask_once(api, plain(200, json.dumps(body).encode()), stream=False)
    assert (record.end, record.words) == (End.FINISHED, ("acorn", "actor"))


async def test_several_choices_of_a_native_answer_come_as_a_list() -> None:
    both = json.dumps([said(" acorn actor", "length"), said(" b c", "length")]).encode()
    assert (await ask_once(Api.GENERATE, plain(200, both), stream=False, n=2)).words == ("acorn", "actor")
    one = json.dumps([said(" acorn actor", "length")]).encode()
    assert (await ask_once(Api.GENERATE, plain(200, one), stream=False, n=2)).end is End.UNTERMINATED


def test_requests_say_greedy_and_how_long() -> None:
    target = make_target("http://127.0.0.1:1", "m")
    ask = Ask(1, Role.LATER, 0, Api.GENERATE, "[wt:1]", 5, True, request_id="wt-1")
    assert json.loads(request_body(target, ask)) == {
        "text": "[wt:1]",
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        "rid": "wt-1",
        "stream": True,
    }
    assert json.loads(request_body(target, replace(ask, api=Api.RESPONSES)))["max_output_tokens"] == 5
    assert "ignore_eos" not in json.loads(request_body(target, replace(ask, api=Api.MESSAGES)))
    assert [target.path(api) for api in (Api.GENERATE, Api.MESSAGES, Api.RESPONSES)] == [
        "/generate",
        "/v1/messages",
        "/v1/responses",
    ]
    assert make_target("http://127.0.0.1:1/v1", "m").path(Api.MESSAGES) == "/messages"


def test_several_choices_where_there_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match=r"victim.n: messages has one choice only"):
        check_plan(StormPlan(victim=Shape(Api.MESSAGES, n=2)))


@asynccontextmanager
async def served(engine: str, folder: Path) -> AsyncIterator[Target]:
    words = "{python} -m windtunnel serve --model m --port {port} --ttft 5ms --itl 2ms"
    async with running(Arm(command=f"{words} --engine {engine}"), folder / "log", time_scale=1.0, seed=0) as server:
        yield make_target(server.url, "m")


@pytest.mark.parametrize(
    ("engine", "apis"),
    [("vllm", (Api.MESSAGES, Api.RESPONSES)), ("sglang", (Api.GENERATE, Api.MESSAGES))],
)
async def test_storms_speak_it_and_check_every_word(engine: str, apis: tuple[Api, ...], tmp_path: Path) -> None:
    plan = StormPlan(victims=4, survivors=2, how=(How.FIN, How.RST), when=Trigger(Moment.TOKENS, 3), bystanders=4, later=4)
    async with served(engine, tmp_path) as target:
        for api in apis:
            shapes = {"victim": Shape(api, max_tokens=400), "survivor": Shape(api, max_tokens=20), "later_shape": Shape(api)}
            result = await run_storm(target, replace(plan, sample_every_ns=20 * MS, **shapes))
            assert find(result) == ()
            assert result.oracle
            assert {one.end for one in result.of(Role.VICTIM)} == {End.LEFT}
            assert all(len(one.words) == one.ask.max_tokens for one in result.of(Role.SURVIVOR, Role.LATER))
            assert len(result.of(Role.SURVIVOR, Role.LATER)) == 6


async def test_a_native_request_is_aborted_by_its_id(tmp_path: Path) -> None:
    plan = StormPlan(victims=3, how=(How.ABORT_ID,), victim=Shape(Api.GENERATE, max_tokens=4000), bystanders=0, later=2)
    async with served("sglang", tmp_path) as target:
        result = await run_storm(target, replace(plan, linger_ns=20 * S))
    assert {victim.finish_reason for victim in result.of(Role.VICTIM)} == {"abort"}
    assert find(result) == ()
