"""What servers say about themselves, and what follows where they have no metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from tests.lab.fake_server import answer

from windtunnel.lab.server_info import server_info
from windtunnel.lab.target import Target, make_target


@asynccontextmanager
async def pages(bodies: Mapping[str, object]) -> AsyncIterator[Target]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
        await answer(writer, 200 if path in bodies else 404, json.dumps(bodies.get(path)))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield make_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")


def card(owner: str, name: str = "m") -> dict[str, object]:
    return {"id": name, "object": "model", "owned_by": owner}


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        (
            {"/v1/models": {"data": [card("vllm")]}, "/version": {"version": "0.33.0"}},
            {"owned_by": "vllm", "version": "0.33.0", "product": "vllm"},
        ),
        ({"/v1/models": {"data": [card("x", "other"), card("llamacpp")]}}, {"owned_by": "llamacpp", "product": "llama.cpp"}),
        (
            {"/v1/models": {"data": [card("vllm")]}, "/debug/requests": {"live": []}},
            {"owned_by": "vllm", "product": "windtunnel"},
        ),
        ({"/v1/models": {"data": [card("openai")]}}, {"owned_by": "openai"}),
        ({"/v1/models": [1], "/version": {"version": "9" * 999}}, {"version": "9" * 80}),
        ({}, {}),
    ],
)
async def test_owner_version_and_product(bodies: Mapping[str, object], expected: Mapping[str, str]) -> None:
    async with pages(bodies) as target:
        assert await server_info(target) == expected


async def test_nobody_there_says_nothing() -> None:
    assert await server_info(make_target("http://127.0.0.1:1", "m")) == {}
