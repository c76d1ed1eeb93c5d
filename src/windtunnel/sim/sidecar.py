"""The router in front of vLLM's prefill and decode engines, as llm-d's sidecar does it (vLLM reference §7.2, §7.4).

The prefill leg goes first, with one token to make; its answer says where the KV is, and the decode leg takes that along. Both
run under the client's context: who leaves between the legs leaves the prefill's blocks behind, and nobody tells it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from windtunnel.core.outputs import TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.sim.calls import NEVER, Attempt
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.kv_fabric import KvFabric
from windtunnel.sim.network import Network
from windtunnel.sim.pairs import PairRouter
from windtunnel.sim.policies import EngineState, PairPolicy
from windtunnel.sim.scenario import PdSpec
from windtunnel.wire.vllm.pairing import REMOTE_DECODE


class SidecarRouter(PairRouter):
    """A `PairRouter` whose legs come one after the other."""

    def __init__(
        self, kernel: Kernel, network: Network, policy: PairPolicy, roles: Sequence[str], spec: PdSpec, fabric: KvFabric
    ) -> None:
        super().__init__(kernel, network, policy, roles, spec, fabric)
        self._next: dict[str, tuple[EngineRequest, EngineState]] = {}
        """What follows the prefill leg of a request."""
        self._wires = fabric

    def forward(self, attempt: Attempt, request: EngineRequest) -> None:
        if (pair := self._chosen(attempt, request)) is None:
            return
        prefill, decode = pair
        attempt.prefill = self._prefill_leg(attempt)
        self._next[attempt.request_id] = (request, decode)
        leg = replace(request, max_tokens=1, min_tokens=0, kv_transfer=REMOTE_DECODE)
        self._send(attempt.prefill, leg, prefill)

    def watch(self, attempt: Attempt, tokens: int) -> None:
        if attempt.engine == NEVER:
            attempt.trigger = tokens
        else:
            super().watch(attempt, tokens)

    def on_final(self, attempt: Attempt, output: TokenOutput, at_ns: int) -> None:
        if attempt.owner is None or output.error is not None:
            super().on_final(attempt, output, at_ns)
            return
        heard = partial(self._prefilled, attempt, attempt.owner, output.kv_transfer)
        self._kernel.at(at_ns + attempt.back_router_ns, heard)

    def _prefilled(self, leg: Attempt, owner: Attempt, params: Mapping[str, Any] | None) -> None:
        """The decode leg goes out with what the prefill has said; without any it computes everything itself."""
        self._release(leg)
        following = self._next.pop(owner.request_id, None)
        if owner.cancelled or following is None:
            self._wires.counts["left_between_the_legs"] += 1
            return
        request, decode = following
        self._send(owner, replace(request, kv_transfer=params), decode, self._spec.lag)

    def _leg_ended(self, leg: Attempt, failed: bool, at_client: Callable[[], None], at_ns: int) -> None:
        if leg.owner is not None:
            self._next.pop(leg.owner.request_id, None)
        super()._leg_ended(leg, failed, at_client, at_ns)

    def _close(self, leg: Attempt) -> None:
        if leg.owner is not None:
            self._next.pop(leg.owner.request_id, None)
        if leg.engine == NEVER:
            leg.closed = True
        else:
            super()._close(leg)
