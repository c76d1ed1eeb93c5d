"""Both workers of a pair share an event loop: leases and patience are as long as the work that is done in them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.own_time import own_time

IN_ONE_LOOP = {"test_pair.py", "test_mooncake.py"}


@pytest.fixture(autouse=True)
async def unhurried(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Not for other processes and threads, whose time is the wall's."""
    if request.path.name not in IN_ONE_LOOP:
        yield
        return
    with own_time(asyncio.get_running_loop()):
        yield
