"""Fault `peer-lost-on-abort`: an aborted room's writes have lost their peer, which the transport reports only after its time.

Both legs of a request are aborted together; the decode frees its memory, and the prefill's handles never complete (SGLang
reference §1.6, ending 2). Only a prefill worker is concerned.
"""

from dataclasses import replace

from windtunnel.serve.seams import Seams


class PeerLostOnAbort:
    NAME = "peer-lost-on-abort"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(disagg_config=lambda config: replace(config, abort_loses_peer=True))


FAULT = PeerLostOnAbort()
