"""Fault `transfer-race`: a transfer worker's update to Transferring comes some time after its check of the room.

With a rule that lets Transferring win over Failed, an abort in between is overwritten (sglang #24522, SGLang reference §1.6).
Under a rule by which Failed sticks it does no harm. Only a prefill worker is concerned.
"""

from dataclasses import replace

from windtunnel.core.units import S, parse_duration_ns
from windtunnel.serve.seams import Seams


class TransferRace:
    NAME = "transfer-race"

    def __init__(self, gap_ns: int = S) -> None:
        self._gap_ns = gap_ns

    def with_option(self, text: str) -> "TransferRace":
        return TransferRace(parse_duration_ns(text))

    def attach(self, seams: Seams) -> Seams:
        return seams.around(disagg_config=lambda config: replace(config, promote_gap_ns=self._gap_ns))


FAULT = TransferRace()
