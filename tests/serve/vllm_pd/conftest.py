"""Prefill, decode and balancer of a test share an event loop: leases and reads take as long as it is given."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.own_time import own_time


@pytest.fixture(autouse=True)
async def unhurried(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Not for processes of their own, whose time is the wall's."""
    if "test_processes" in request.node.nodeid:
        yield
        return
    with own_time(asyncio.get_running_loop()):
        yield
