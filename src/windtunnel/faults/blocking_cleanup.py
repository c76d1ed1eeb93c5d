"""Fault `blocking-cleanup`: cleaning up after a client that has left holds the event loop (LiteLLM #36429)."""

import time
from collections.abc import Sequence

from windtunnel.core.units import MS, parse_duration_ns
from windtunnel.serve.seams import Abort, Seams, disconnect_aborts


class BlockingCleanup:
    NAME = "blocking-cleanup"

    def __init__(self, each_ns: int = 120 * MS) -> None:
        self._each_ns = each_ns

    def with_option(self, text: str) -> "BlockingCleanup":
        return BlockingCleanup(parse_duration_ns(text))

    def attach(self, seams: Seams) -> Seams:
        return seams.with_(disconnected=self._disconnected)

    def _disconnected(self, abort: Abort, request_ids: Sequence[str]) -> bool:
        time.sleep(self._each_ns / 1e9)
        return disconnect_aborts(abort, request_ids)


FAULT = BlockingCleanup()
