"""The router in front of vLLM's prefill and decode engines with Mooncake: both legs at once, under one transfer id.

That is what vLLM's example proxy does (`mooncake_connector_proxy.py` of 0.33.0, read and not run). The proxy's prefill legs
belong to nobody: `pd.aborts = "decode"` with `pd.cancel_peer = false`. A prefill's engine id is that of its present process.
"""

from dataclasses import replace

from windtunnel.core.request import EngineRequest
from windtunnel.sim.calls import Attempt
from windtunnel.sim.fabric import BOOTSTRAP_PORT
from windtunnel.sim.kv_fabric import KvFabric
from windtunnel.sim.pairs import PairRouter
from windtunnel.sim.policies import EngineState
from windtunnel.wire.vllm.pairing import mooncake_params


class MooncakeRouter(PairRouter):
    """A `PairRouter` whose legs share a transfer id."""

    _fabric: KvFabric

    def _legs(self, attempt: Attempt, request: EngineRequest, prefill: EngineState) -> tuple[EngineRequest, EngineRequest]:
        bootstrap = f"http://{self._fabric.host(prefill.index)}:{BOOTSTRAP_PORT}"
        engine_id = self._fabric.engine_id(prefill.index)
        to_prefill, to_decode = mooncake_params(f"xfer-{attempt.request_id}", bootstrap, engine_id)
        first = replace(request, max_tokens=1, min_tokens=0, kv_transfer=to_prefill)
        return first, replace(request, kv_transfer=to_decode)
