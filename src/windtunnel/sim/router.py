"""The router: takes requests from clients, lets the policy choose, keeps count of what is where, and passes answers on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from windtunnel.core.outputs import FinishReason, KvEvent, Refusal, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.sim.calls import NEVER, Attempt
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.network import FRAME_BYTES, HEAD_BYTES, Network, request_bytes
from windtunnel.sim.policies import EngineState, Policy
from windtunnel.sim.replica import Replica

NO_BACKEND = Refusal("no_backend", "No healthy engine.", 503)


class Client(Protocol):
    """Where answers end up; called when they have arrived."""

    def on_tokens(self, attempt: Attempt) -> None:
        """As many tokens as the attempt's trigger asked for have arrived."""
        ...

    def on_answered(self, attempt: Attempt, reason: FinishReason) -> None: ...

    def on_refused(self, attempt: Attempt, refusal: Refusal) -> None: ...

    def on_reset(self, attempt: Attempt) -> None: ...


class Router:
    """Owns the engines' states as a router sees them. Implements `replica.Receiver`; `forward` is for those below."""

    def __init__(
        self, kernel: Kernel, network: Network, learn: Callable[[int, Sequence[KvEvent]], None], roles: Sequence[str]
    ) -> None:
        """`learn` is told what the caches of the engines have gained and lost."""
        self.states = [EngineState(at, role, place=roles[:at].count(role)) for at, role in enumerate(roles)]
        self.replicas: list[Replica] = []
        """In index order; filled by whoever builds the cluster."""
        self.routed = [0] * len(roles)
        self.client: Client
        self._kernel = kernel
        self._network = network
        self._learn = learn
        self._candidates: list[EngineState] | None = None

    # Requests

    def forward(self, attempt: Attempt, request: EngineRequest) -> None:
        """A request has arrived from its client."""
        raise NotImplementedError

    def _healthy(self) -> list[EngineState]:
        if self._candidates is None:
            self._candidates = [state for state in self.states if state.healthy]
        return self._candidates

    def _send(self, attempt: Attempt, request: EngineRequest, state: EngineState, lag_ns: int = 0) -> None:
        tokens = len(request.prompt_token_ids)
        state.in_flight += 1
        state.in_flight_tokens += tokens
        self.routed[state.index] += 1
        attempt.engine = state.index
        attempt.back_router_ns = self._network.router_engine_ns(FRAME_BYTES)
        attempt.return_ns = attempt.back_router_ns + self._network.client_router_ns(FRAME_BYTES)
        replica = self.replicas[state.index]
        arrive = partial(self._arrive, attempt, request, replica)
        delay_ns = lag_ns + self._network.router_engine_ns(request_bytes(tokens))
        self._kernel.after(delay_ns, partial(replica.deliver, partial(replica.read, attempt, arrive)))

    def _arrive(self, attempt: Attempt, request: EngineRequest, replica: Replica) -> None:
        """The request has reached its engine."""
        if attempt.closed:
            return
        now_ns = self._kernel.now_ns
        if not replica.up:
            self.on_lost(attempt, now_ns)
            return
        attempt.generation = replica.generation
        refusal = replica.submit(attempt, request)
        if refusal is not None:
            self._refused(attempt, refusal, now_ns)

    def cancel(self, attempt: Attempt) -> None:
        """The client has closed its connection, and the router has noticed."""
        attempt.cancelled = attempt.closed = True
        if attempt.engine == NEVER:
            return
        self._release(attempt)
        replica = self.replicas[attempt.engine]
        delay_ns = self._network.router_engine_ns(HEAD_BYTES)
        self._kernel.after(delay_ns, partial(replica.deliver, partial(replica.abort, attempt.request_id)))

    def sync(self, attempt: Attempt) -> None:
        """Let the attempt know of all tokens that have left its engine."""
        if attempt.engine != NEVER:
            self.replicas[attempt.engine].sync(attempt)

    def watch(self, attempt: Attempt, tokens: int) -> None:
        """Tell the client when so many tokens have come; fewer have left the engine so far."""
        attempt.trigger = tokens
        self.replicas[attempt.engine].watch(attempt)

    # Answers

    def on_trigger(self, attempt: Attempt, at_ns: int) -> None:
        self._kernel.at(at_ns + attempt.return_ns, partial(self.client.on_tokens, attempt))

    def on_final(self, attempt: Attempt, output: TokenOutput, at_ns: int) -> None:
        failed = output.error is not None and output.error.status >= 500
        reason = FinishReason.ERROR if failed else output.finish_reason or FinishReason.STOP
        self._return(attempt, partial(self.client.on_answered, attempt, reason), at_ns)

    def on_lost(self, attempt: Attempt, at_ns: int) -> None:
        if attempt.back_router_ns == NEVER:
            attempt.back_router_ns = attempt.return_ns = 0
        self._return(attempt, partial(self.client.on_reset, attempt), at_ns)

    def _refused(self, attempt: Attempt, refusal: Refusal, at_ns: int) -> None:
        self._return(attempt, partial(self._refuse_at_client, attempt, refusal), at_ns)

    def _return(self, attempt: Attempt, at_client: Callable[[], None], at_ns: int) -> None:
        """The last message of an engine about this attempt passes here on its way."""
        self._kernel.at(at_ns + attempt.back_router_ns, partial(self._pass, attempt, at_client, at_ns))

    def _pass(self, attempt: Attempt, at_client: Callable[[], None], at_ns: int) -> None:
        self._release(attempt)
        if not attempt.cancelled:
            self._kernel.at(at_ns + attempt.return_ns, at_client)

    def _answer(self, attempt: Attempt, at_client: Callable[[], None], at_ns: int) -> None:
        self._kernel.at(at_ns + self._network.client_router_ns(HEAD_BYTES), at_client)

    def _refuse_at_client(self, attempt: Attempt, refusal: Refusal) -> None:
        self.client.on_refused(attempt, refusal)

    def _release(self, attempt: Attempt) -> None:
        """Count it out, once."""
        if attempt.released:
            return
        attempt.released = True
        state = self.states[attempt.engine]
        state.in_flight -= 1
        state.in_flight_tokens -= attempt.prompt_tokens
        assert state.in_flight >= 0, f"engine {state.index}: more ended than were sent"

    # What it learns

    def mark(self, engine: int, *, healthy: bool, after_ns: int) -> None:
        """From `after_ns` on the router knows this."""
        self._kernel.after(after_ns, partial(self._set_health, engine, healthy))

    def _set_health(self, engine: int, healthy: bool) -> None:
        self.states[engine].healthy = healthy
        self._candidates = None

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        """Events of a step leave the engine as it ends."""
        delay_ns = self._network.router_engine_ns(HEAD_BYTES)
        self._kernel.after(delay_ns, partial(self._learn, engine, events))


class OneRouter(Router):
    """One engine for each request."""

    def __init__(self, kernel: Kernel, network: Network, policy: Policy, roles: Sequence[str]) -> None:
        super().__init__(kernel, network, policy.on_kv_events, roles)
        self._policy = policy

    def forward(self, attempt: Attempt, request: EngineRequest) -> None:
        if attempt.cancelled:
            return
        engines = self._healthy()
        if not engines:
            self._answer(attempt, partial(self._refuse_at_client, attempt, NO_BACKEND), self._kernel.now_ns)
            return
        self._send(attempt, request, self._policy.choose(request, engines))
