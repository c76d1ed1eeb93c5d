"""Both workers of a test of the transport share an event loop: scaled timeouts are as long as the work that is done in it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.own_time import own_time


@pytest.fixture(autouse=True)
async def unhurried(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Not for other processes and threads, whose time is the wall's."""
    if "test_transport" not in request.node.nodeid:
        yield
        return
    with own_time(asyncio.get_running_loop()):
        yield
