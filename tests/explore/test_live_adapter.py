"""The live server under a deterministic loop: a client that leaves at any await leaves nothing behind."""

import logging

import pytest
from tests.explore import deterministic
from tests.explore.disconnects import MECHANISMS, NEVER, Run, every_await, run

pytestmark = pytest.mark.skipif(not deterministic.AVAILABLE, reason=deterministic.REASON)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def test_a_seed_repeats_exactly() -> None:
    first, second = (run(Run(5, "rst", True, 30)) for _ in range(2))
    assert first.steps == second.steps
    assert first.left_early


def test_another_seed_is_another_order() -> None:
    assert len({run(Run(seed, "rst", True, NEVER)).steps for seed in range(6)}) > 1


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_whoever_leaves_at_any_await_leaves_nothing_behind(mechanism: str) -> None:
    for spec in every_await(seed=1):
        if spec.mechanism == mechanism:
            assert run(spec).left_early, spec


def test_a_server_that_does_not_listen_is_found_out() -> None:
    with pytest.raises(AssertionError):
        run(Run(1, "rst", True, 40, faults=("deaf-to-disconnect",)))
