"""Clients: they ask, wait, lose patience, try again, hedge, and leave early.

A call is one question. It has one or more attempts; each attempt and each call ends exactly once, as the client sees it. An
attempt that its client closes may still end differently at the engine: that side has its own ledger.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from windtunnel.core.outputs import FinishReason, Refusal
from windtunnel.core.request import EngineRequest
from windtunnel.sim.calls import NEVER, Attempt, Call, Outcome
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.network import HEAD_BYTES, Network, request_bytes
from windtunnel.sim.router import Router
from windtunnel.sim.scenario import ClientSpec
from windtunnel.sim.tokens import Answer
from windtunnel.sim.workload import Question

FREE_RETRIES = 10
"""Retries that are allowed whatever the budget says."""
_ENDS: dict[FinishReason, Outcome] = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}


class Clients:
    """Owns all calls. Implements `router.Client`."""

    def __init__(
        self, spec: ClientSpec, kernel: Kernel, network: Network, router: Router, on_ended: Callable[[Call], None]
    ) -> None:
        self.live: dict[int, Call] = {}
        self.sent = 0
        self.attempts = 0
        self.retries = 0
        self.hedges = 0
        self.attempt_outcomes: Counter[Outcome] = Counter()
        self._spec = spec
        self._kernel = kernel
        self._network = network
        self._router = router
        self._on_ended = on_ended
        self._chance = kernel.stream("clients")
        self.leaves: Callable[[Question], bool] = self.leaves_by_chance
        """Whether the client of this question leaves early, in the scenario's way."""

    def ask(self, question: Question) -> None:
        call = Call(question, self._kernel.now_ns, self.leaves(question))
        assert question.number not in self.live, f"question {question.number} asked twice"
        self.live[question.number] = call
        self.sent += 1
        self._send(call)
        if self._spec.hedge_after:
            self._kernel.after(self._spec.hedge_after, partial(self._hedge, call))

    def leaves_by_chance(self, _question: Question) -> bool:
        return self._spec.abort.share > 0 and self._chance.random() < self._spec.abort.share

    # One attempt

    def _send(self, call: Call) -> None:
        call.retry_at = None
        now_ns, question = self._kernel.now_ns, call.question
        attempt = Attempt(f"{question.number}.{len(call.attempts)}", call, now_ns, len(question.prompt_token_ids))
        call.attempts.append(attempt)
        self.attempts += 1
        request = EngineRequest(
            request_id=attempt.request_id,
            prompt_token_ids=question.prompt_token_ids,
            source=Answer(question.number),
            max_tokens=question.output_tokens,
            arrival_ns=now_ns,
            ignore_eos=True,
            session_id=question.session,
        )
        self._arm(attempt)
        delay_ns = self._network.client_router_ns(request_bytes(len(question.prompt_token_ids)))
        self._kernel.after(delay_ns, partial(self._router.forward, attempt, request))

    def _arm(self, attempt: Attempt) -> None:
        """Set what this client will do by itself."""
        spec, after = self._spec, self._kernel.after
        if spec.timeout:
            attempt.timers.append(after(spec.timeout, partial(self._time_out, attempt)))
        if spec.ttft_timeout:
            attempt.timers.append(after(spec.ttft_timeout, partial(self._time_out_first, attempt)))
        if spec.hedge_after:
            attempt.trigger = 1
        if not attempt.call.abort:
            return
        match spec.abort.when:
            case "tokens":
                attempt.trigger = 1 if spec.hedge_after else spec.abort.tokens
            case "time":
                attempt.timers.append(after(spec.abort.after, partial(self._leave, attempt)))
            case "queued":
                attempt.timers.append(after(self._network.queued_ns, partial(self._leave_queue, attempt)))

    def _close(self, attempt: Attempt, outcome: Outcome) -> None:
        """The client closes the connection; the router hears of it one delay later."""
        self._end_attempt(attempt, outcome)
        self._kernel.after(self._network.client_router_ns(HEAD_BYTES), partial(self._left, attempt))

    def _left(self, attempt: Attempt) -> None:
        attempt.left_ns = self._kernel.now_ns
        self._router.cancel(attempt)

    def _end_attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        assert attempt.live, f"attempt {attempt.request_id} ended twice: {attempt.outcome}, {outcome}"
        if outcome != "finished":
            self._router.sync(attempt)
        attempt.outcome, attempt.ended_ns = outcome, self._kernel.now_ns
        self.attempt_outcomes[outcome] += 1
        for timer in attempt.timers:
            timer.cancel()
        attempt.timers.clear()

    # Impatience

    def _time_out(self, attempt: Attempt) -> None:
        if attempt.live:
            self._close(attempt, "timed_out")
            self._unanswered(attempt.call, "timed_out")

    def _time_out_first(self, attempt: Attempt) -> None:
        if attempt.live and not attempt.received(self._kernel.now_ns):
            self._time_out(attempt)

    def _leave_queue(self, attempt: Attempt) -> None:
        if attempt.live and not attempt.received(self._kernel.now_ns):
            self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        if attempt.live:
            self._close(attempt, "aborted")
            self._end_call(attempt.call, "aborted")

    def _hedge(self, call: Call) -> None:
        """No token yet: ask somebody else too."""
        live = [attempt for attempt in call.attempts if attempt.live]
        if call.outcome is None and call.winner is None and len(live) == 1:
            self.hedges += 1
            self._send(call)

    # Answers

    def on_tokens(self, attempt: Attempt) -> None:
        if not attempt.live:
            return
        spec, call = self._spec, attempt.call
        wanted = spec.abort.tokens if call.abort and spec.abort.when == "tokens" else NEVER
        if attempt.trigger == 1 and spec.hedge_after:
            self._win(attempt)
        if wanted == NEVER:
            return
        self._router.sync(attempt)
        received = attempt.received(self._kernel.now_ns)
        if received >= wanted:
            self._leave(attempt)
        elif len(attempt.times_ns) < wanted:
            self._router.watch(attempt, wanted)
        else:
            self._kernel.at(attempt.times_ns[wanted - 1] + attempt.return_ns, partial(self._leave, attempt))

    def on_answered(self, attempt: Attempt, reason: FinishReason) -> None:
        if not attempt.live:
            return
        outcome = _ENDS.get(reason, "finished")
        self._end_attempt(attempt, outcome)
        if outcome == "finished":
            self._win(attempt)
            self._end_call(attempt.call, "finished")
        else:
            self._unanswered(attempt.call, outcome)

    def on_refused(self, attempt: Attempt, refusal: Refusal) -> None:
        if attempt.live:
            attempt.status = refusal.status
            self._end_attempt(attempt, "refused")
            self._unanswered(attempt.call, "refused", retry=refusal.status != 400)

    def on_reset(self, attempt: Attempt) -> None:
        if attempt.live:
            self._end_attempt(attempt, "failed")
            self._unanswered(attempt.call, "failed")

    def _win(self, attempt: Attempt) -> None:
        """The first to speak has the call; the others are closed."""
        call = attempt.call
        if call.winner is None:
            call.winner = attempt
            for other in call.attempts:
                if other is not attempt and other.live:
                    self._close(other, "aborted")

    # The call

    def _unanswered(self, call: Call, outcome: Outcome, *, retry: bool = True) -> None:
        """An attempt came to nothing: wait for its twin, try again, or give up."""
        if call.outcome is not None or any(attempt.live for attempt in call.attempts):
            return
        call.winner = None
        if retry and self._may_retry(call, outcome):
            call.retries += 1
            self.retries += 1
            call.retry_at = self._kernel.after(self._backoff_ns(call.retries), partial(self._send, call))
        else:
            self._end_call(call, outcome)

    def _may_retry(self, call: Call, outcome: Outcome) -> bool:
        spec = self._spec
        in_budget = self.retries < spec.retry_budget * self.sent + FREE_RETRIES
        return outcome in spec.retry_on and call.retries < spec.retries and in_budget

    def _backoff_ns(self, retry: int) -> int:
        """Exponential, with full jitter."""
        ceiling_ns = min(self._spec.backoff_max, self._spec.backoff << min(retry - 1, 32))
        return round(ceiling_ns * self._chance.random())

    def _end_call(self, call: Call, outcome: Outcome) -> None:
        assert call.outcome is None, f"call {call.question.number} ended twice: {call.outcome}, {outcome}"
        call.outcome, call.ended_ns = outcome, self._kernel.now_ns
        for attempt in call.attempts:
            if attempt.live:
                self._close(attempt, "aborted")
        del self.live[call.question.number]
        self._on_ended(call)
        # Without this a call and its attempts would live on until a garbage collection finds their circle.
        for attempt in call.attempts:
            attempt.prefill = None if attempt.prefill is None or attempt.prefill.released else attempt.prefill
        call.attempts.clear()
        call.winner = None
