"""One recorded case against a running server."""

from tests.conformance.cases import Case
from tests.conformance.compare import differences
from tests.conformance.exchange import send, send_raw, split_answers


def replay(case: Case, port: int) -> list[str]:
    """The differences; empty when the case matches. A failure to answer at all is a difference too."""
    try:
        return _replay_raw(case, port) if case.raw is not None else differences(case.expected, send(case, port))
    except (OSError, ValueError) as error:
        return [f"no complete answer: {error}"]


def _replay_raw(case: Case, port: int) -> list[str]:
    assert case.raw is not None
    response = case.raw["response"]
    recorded = response["raw"].encode("utf-8", "surrogateescape")
    closed = bool(response.get("server_closed"))
    got = send_raw(case.raw["request"]["sent_raw"], port, expect_close=closed, expect_bytes=bool(recorded))
    wanted, answers = split_answers(recorded), split_answers(got.data)
    found = [] if got.closed == closed else [f"connection closed: {got.closed} instead of {closed}"]
    if len(wanted) != len(answers):
        return [*found, f"{len(answers)} answers instead of {len(wanted)}: {got.data[:300]!r}"]
    for number, pair in enumerate(zip(wanted, answers, strict=True)):
        found += [f"answer {number}: {line}" for line in differences(*pair)]
    return found
