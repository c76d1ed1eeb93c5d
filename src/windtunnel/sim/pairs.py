"""The router in front of prefill and decode workers: each request has two legs, with one room.

The client hears the decode leg. A leg that fails before the first token ends the request, and (`pd.cancel_peer`) closes the
other leg; a prefill leg that fails after the first token changes nothing. Every attempt has a room of its own.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from windtunnel.core.outputs import FinishReason, Refusal, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.sim.calls import NEVER, Attempt
from windtunnel.sim.fabric import BOOTSTRAP_PORT, Fabric
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.kv_fabric import KvFabric
from windtunnel.sim.network import HEAD_BYTES, Network
from windtunnel.sim.policies import EngineState, PairPolicy
from windtunnel.sim.replica import Replica
from windtunnel.sim.router import NO_BACKEND, Router
from windtunnel.sim.scenario import PdSpec

TOLD = {"both": ("prefill", "decode"), "prefill": ("prefill",), "decode": ("decode",), "none": ()}


class PairRouter(Router):
    """A `Router` whose attempts have a second leg, `attempt.prefill`, which is an attempt too."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        policy: PairPolicy,
        roles: Sequence[str],
        spec: PdSpec,
        fabric: Fabric | KvFabric,
    ) -> None:
        super().__init__(kernel, network, policy.on_kv_events, roles)
        self.legs: Counter[str] = Counter()
        """`prefill sent`, `decode arrived`, …: `arrived` has reached its engine, `entered` was given to it."""
        self._pairs = policy
        self._spec = spec
        self._fabric = fabric
        self._rooms = 0

    # Requests

    def forward(self, attempt: Attempt, request: EngineRequest) -> None:
        if (pair := self._chosen(attempt, request)) is None:
            return
        prefill, decode = pair
        to_prefill, to_decode = self._legs(attempt, request, prefill)
        attempt.prefill = self._prefill_leg(attempt)
        self._send(attempt.prefill, to_prefill, prefill)
        self._send(attempt, to_decode, decode, self._spec.lag)

    def _legs(self, attempt: Attempt, request: EngineRequest, prefill: EngineState) -> tuple[EngineRequest, EngineRequest]:
        """What goes to the prefill and what to the decode."""
        self._rooms += 1
        paired = replace(request, bootstrap=(self._fabric.host(prefill.index), BOOTSTRAP_PORT, self._rooms))
        return paired, paired

    def _chosen(self, attempt: Attempt, request: EngineRequest) -> tuple[EngineState, EngineState] | None:
        """A prefill and a decode; None when the client has gone, or was told that there is no such pair."""
        if attempt.cancelled:
            return None
        prefills, decodes = ([state for state in self._healthy() if state.role == role] for role in ("prefill", "decode"))
        if prefills and decodes:
            return self._pairs.choose_pair(request, prefills, decodes)
        self._answer(attempt, partial(self._refuse_at_client, attempt, NO_BACKEND), self._kernel.now_ns)
        return None

    def _prefill_leg(self, attempt: Attempt) -> Attempt:
        return Attempt(attempt.request_id, attempt.call, self._kernel.now_ns, attempt.prompt_tokens, owner=attempt)

    def _send(self, attempt: Attempt, request: EngineRequest, state: EngineState, lag_ns: int = 0) -> None:
        self.legs[f"{state.role} sent"] += 1
        super()._send(attempt, request, state, lag_ns)

    def _arrive(self, attempt: Attempt, request: EngineRequest, replica: Replica) -> None:
        role = self.states[replica.index].role
        self.legs[f"{role} arrived"] += 1
        if replica.up and not attempt.closed:
            self.legs[f"{role} entered"] += 1
        super()._arrive(attempt, request, replica)

    def cancel(self, attempt: Attempt) -> None:
        """The client has gone: tell the legs that are to hear of it."""
        attempt.cancelled = True
        for leg in (attempt.prefill, attempt):
            if leg is not None and leg.engine != NEVER and self.states[leg.engine].role in TOLD[self._spec.aborts]:
                self._close(leg)

    # Answers

    def on_final(self, attempt: Attempt, output: TokenOutput, at_ns: int) -> None:
        reason = FinishReason.ERROR if output.error is not None and output.error.status >= 500 else output.finish_reason
        failed = reason in (FinishReason.ABORT, FinishReason.ERROR)
        owner = attempt.owner or attempt
        self._leg_ended(attempt, failed, partial(self.client.on_answered, owner, reason or FinishReason.STOP), at_ns)

    def on_lost(self, attempt: Attempt, at_ns: int) -> None:
        self._leg_ended(attempt, True, partial(self.client.on_reset, attempt.owner or attempt), at_ns)

    def _refused(self, attempt: Attempt, refusal: Refusal, at_ns: int) -> None:
        owner = attempt.owner or attempt
        self._leg_ended(attempt, True, partial(self._refuse_at_client, owner, refusal), at_ns)

    def _leg_ended(self, leg: Attempt, failed: bool, at_client: Callable[[], None], at_ns: int) -> None:
        self._kernel.at(at_ns + leg.back_router_ns, partial(self._heard, leg, failed, at_client, at_ns))

    def _heard(self, leg: Attempt, failed: bool, at_client: Callable[[], None], at_ns: int) -> None:
        self._release(leg)
        owner = leg.owner or leg
        other = owner if leg is not owner else owner.prefill
        if leg is not owner and not (failed and not owner.times_ns):
            return
        if not owner.cancelled:
            self._kernel.at(at_ns + owner.return_ns, at_client)
        if failed and other is not None and self._spec.cancel_peer:
            self._close(other)

    def _close(self, leg: Attempt) -> None:
        """Close the connection to this leg's engine. It may be over already."""
        leg.closed = True
        if leg.released:
            return
        self._release(leg)
        replica = self.replicas[leg.engine]
        delay_ns = self._network.router_engine_ns(HEAD_BYTES)
        self._kernel.after(delay_ns, partial(replica.deliver, partial(replica.abort, leg.request_id)))

    # The end

    def leg_counts(self) -> dict[str, dict[str, int]]:
        """Both legs: what was sent, what its engines did with it. Raises AssertionError if a leg ended other than once."""
        return {role: self._leg_counts(role) for role in ("prefill", "decode")}

    def _leg_counts(self, role: str) -> dict[str, int]:
        sent, arrived, entered = (self.legs[f"{role} {what}"] for what in ("sent", "arrived", "entered"))
        counts = {"sent": sent, "on_the_way": sent - arrived, "not_entered": arrived - entered}
        ledgers = [replica.ledger for replica in self.replicas if self.states[replica.index].role == role]
        for name in ledgers[0].counts():
            counts[name] = sum(ledger.counts()[name] for ledger in ledgers)
        assert sent >= arrived >= entered == counts["submitted"] + counts["refused"], f"{role} legs: {counts}"
        return counts
