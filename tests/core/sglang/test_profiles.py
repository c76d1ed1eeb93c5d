"""Release profiles (SGLang reference §11.2)."""

import pytest

from windtunnel.core.sglang.profiles import SOURCES, profile
from windtunnel.core.transfer.status import RULES


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("0.4.10", "max"),
        ("0.5.5", "max"),
        ("0.5.6", "failset"),
        ("0.5.12", "nores"),
        ("0.5.15.post1", "nores"),
        ("0.5.16", "nixl-sticky"),
        ("0.5.19", "nixl-sticky"),
        ("0.5.20", "terminal-failed"),
        ("0.5.23", "terminal-failed"),
    ],
)
def test_the_status_rule_by_release(version: str, rule: str) -> None:
    assert profile(version).status_rule == rule
    assert rule in RULES


def test_a_switch_changes_with_the_release_that_set_it() -> None:
    history = {version: profile(version) for version in ("0.5.12", "0.5.13", "0.5.16", "0.5.20", "0.5.21")}
    assert [item.prefill_on_abort for item in history.values()] == ["ignore", "dies", "fail", "ack", "ack"]
    assert [item.deferred_release for item in history.values()] == [False, False, False, False, True]
    assert [item.decode_sends_abort for item in history.values()] == [False, True, True, True, True]


def test_every_switch_names_its_source() -> None:
    assert len(SOURCES) > 25
    assert all(SOURCES.values())


@pytest.mark.parametrize("version", ["0.4.9", "0.6.0", "latest", "0.5"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"0\.5\.23"):
        profile(version)
