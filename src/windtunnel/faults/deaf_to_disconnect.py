"""Fault `deaf-to-disconnect`: the client's leaving is seen and ignored, so the request runs to its end (vLLM #10087)."""

from collections.abc import Sequence

from windtunnel.serve.seams import Abort, Seams


def _ignore(_abort: Abort, _request_ids: Sequence[str]) -> bool:
    return False


class DeafToDisconnect:
    NAME = "deaf-to-disconnect"

    def attach(self, seams: Seams) -> Seams:
        return seams.with_(disconnected=_ignore)


FAULT = DeafToDisconnect()
