"""smg's cache-aware policy subscribes to the KV events of gRPC workers (clients reference §4.2)."""

import logging

import pytest
from tests.compat import peers, smg
from tests.compat.cases import WORKS
from tests.compat.site import site


async def test_the_cache_aware_policy_subscribes_to_the_workers_events(caplog: pytest.LogCaptureFixture) -> None:
    """And a conversation goes back to the worker whose cache holds it."""
    (setup,) = (setup for setup in smg.PEER.setups if "cache_aware" in setup.row)
    caplog.set_level(logging.INFO, "windtunnel.serve")
    async with site(setup.mode, peers.program("smg")) as made:
        assert await setup.probe(made) == WORKS
    assert sum("subscribes" in record.message for record in caplog.records) >= 2
