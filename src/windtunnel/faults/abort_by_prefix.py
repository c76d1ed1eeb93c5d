"""Fault `abort-by-prefix`: an abort also ends everybody whose id begins alike (SGLang P27, sglang #25561)."""

from collections.abc import Sequence

from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams

PREFIX = 8
"""So many characters of an id are looked at."""


class PrefixEngine(Proxy):
    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        meant = set(request_ids)
        prefixes = {request_id[:PREFIX] for request_id in meant}
        alike = [view.request_id for view in self._inner.live() if view.request_id[:PREFIX] in prefixes]
        ended: int = self._inner.abort(request_ids, now_ns, notify=notify)
        self._inner.abort([one for one in alike if one not in meant], now_ns, notify=True)
        return ended


class AbortByPrefix:
    NAME = "abort-by-prefix"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=PrefixEngine)


FAULT = AbortByPrefix()
