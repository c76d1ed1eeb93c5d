"""What differs on the wire between the vLLM releases that windtunnel speaks.

0.32.0 is the recorded release (golden data), 0.33.0 the described one (vLLM reference). Anything not in this table is
the same in both.
"""

from dataclasses import dataclass

LATEST = "0.33.0"


@dataclass(frozen=True, slots=True)
class Profile:
    """The optional members of one release."""

    version: str
    weight_versions: bool
    """Choices and finishing chunks carry `weight_versions`."""
    metrics_when_off: bool
    """Bodies carry `metrics: null` without `--enable-per-request-metrics`."""
    stream_kv_transfer: bool
    """Every completion chunk carries `kv_transfer_params` at top level."""
    cache_salt_max_chars: int
    cache_salt_forbidden: str
    anthropic_error_types: bool
    """`/v1/messages` names errors as Anthropic does (`invalid_request_error`), not by vLLM's own kinds."""
    responses_incomplete_event: bool
    """A Responses stream that hit its token limit ends with `response.incomplete`, not `response.completed`."""
    responses_cache_members: bool
    """Responses echo `prompt_cache_*` and `safety_identifier`."""


_TABLE = {
    (0, 32): Profile("0.32.0", False, True, False, 1024, "", False, False, False),
    (0, 33): Profile("0.33.0", True, False, True, 128, "@/\\\0", True, True, True),
}


def profile(version: str) -> Profile:
    """The profile of a version string such as `0.32.0`; unknown ones raise ValueError naming the known ones."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
        return _TABLE[major, minor]
    except (KeyError, ValueError):
        known = ", ".join(row.version for row in _TABLE.values())
        raise ValueError(f"vLLM version {version!r} is not known; use one of {known}") from None
