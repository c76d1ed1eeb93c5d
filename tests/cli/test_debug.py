"""`windtunnel debug`: the table of what live requests hold."""

from windtunnel.cli.debug import _workers, table


def test_each_request_says_where_it_is_and_what_it_holds() -> None:
    held = {"queue": "inflight", "room": 77, "status": ["TRANSFERRING", None], "metadata_slot": 3, "row": 0, "pages": [4, 5]}
    common = {"state": "handover", "prompt_tokens": 64, "computed_tokens": 64, "output_tokens": 0}
    lines = table(
        [
            {"request_id": "young", "in_state_ms": 10.0, "resources": {}, **common},
            {"request_id": "old", "in_state_ms": 31_000.0, "resources": held, **common},
        ]
    )
    assert lines[0].split() == ["request", "queue", "for", "room", "status", "slot", "row", "pages", "tokens"]
    assert lines[1].split() == ["old", "inflight", "31.0s", "77", "TRANSFERRING,-", "3", "0", "2", "64/64+0"]
    assert lines[2].split() == ["young", "handover", "0.0s", "-", "-", "-", "-", "0", "64/64+0"]
    assert table([]) == ["no such request"]


def test_transfer_workers_that_wait_are_named() -> None:
    busy = {"room": 77, "action": "wait", "queued": 2}
    part = {
        "mode": "prefill",
        "profile": "0.5.12",
        "status_rule": "nores",
        "outstanding": {"rooms": 1, "metadata_slots": 1},
        "transfer_workers": [[{"room": None, "action": "pop", "queued": 0}, busy]],
    }
    assert _workers(part).splitlines() == [
        "prefill (release 0.5.12, rule nores) holds 1 rooms, 1 metadata slots",
        "  rank 0 queue 1: room 77 at wait, 2 behind it",
    ]


def test_blocks_that_are_kept_for_a_reader_are_named() -> None:
    part = {
        "mode": "kv_producer",
        "connector": "NixlConnector",
        "outstanding": {"holds": 1, "loads": 0},
        "holds": [{"request_id": "cmpl-1-0-ab", "blocks": [1, 2, 3], "lease_ms": 29_500.0}],
    }
    assert _workers(part).splitlines() == [
        "kv_producer (NixlConnector) holds 1 holds, 0 loads",
        "  cmpl-1-0-ab: 3 blocks for another 29.5s",
    ]
