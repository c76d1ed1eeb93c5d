"""Faults of vLLM's prefill/decode that are a switch of `KvTransferConfig`: one class."""

from dataclasses import replace
from typing import Any

from windtunnel.serve.seams import Seams


class KvSwitch:
    def __init__(self, name: str, **changes: Any) -> None:
        """`changes` are fields of `KvTransferConfig`."""
        self.NAME = name
        self._changes = changes

    def attach(self, seams: Seams) -> Seams:
        return seams.around(disagg_config=lambda config: replace(config, **self._changes))
