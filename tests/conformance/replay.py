"""One recorded case against a running server."""

import json
from dataclasses import replace

from tests.conformance.cases import Answer, Case
from tests.conformance.compare import differences
from tests.conformance.exchange import send, send_raw, split_answers


def replay(case: Case, port: int, ids: dict[str, str] | None = None) -> list[str]:
    """The differences; empty when the case matches. A failure to answer at all is a difference too.

    `ids` holds our ids of the responses that earlier cases made, by the recorded ones, and is added to.
    """
    ids = {} if ids is None else ids
    try:
        if case.raw is not None:
            return _replay_raw(case, port)
        got = send(replace(case, path=_renamed(case.path, ids)), port)
        ids |= _same_ids(case.expected, got)
        return differences(case.expected, got)
    except (OSError, ValueError) as error:
        return [f"no complete answer: {error}"]


def _renamed(path: str, ids: dict[str, str]) -> str:
    for recorded, ours in ids.items():
        path = path.replace(recorded, ours)
    return path


def _same_ids(want: Answer, have: Answer) -> dict[str, str]:
    """The id of a response object, recorded and ours."""
    try:
        values = json.loads(want.body), json.loads(have.body)
    except ValueError:
        return {}
    if not all(isinstance(value, dict) and value.get("object") == "response" for value in values):
        return {}
    return {values[0]["id"]: values[1]["id"]}


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
