"""Fault `head-of-line-wedge`: the KV pool holds only half a context, a longer prompt at its head blocks all (vLLM #39734)."""

from dataclasses import replace
from typing import Any

from windtunnel.serve.seams import Seams


def _half_a_context(config: Any) -> Any:
    return replace(config, unsafe_pool=True, num_blocks=max(config.max_model_len // config.block_size // 2, 1) + 1)


class HeadOfLineWedge:
    NAME = "head-of-line-wedge"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine_config=_half_a_context)


FAULT = HeadOfLineWedge()
