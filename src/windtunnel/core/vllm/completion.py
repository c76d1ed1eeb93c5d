"""What follows the model's part of a step: tokens, stops, published blocks (vLLM reference §5.2)."""

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import TokenOutput
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step


class Completion:
    """Ends one step; lives as long as that. `ended` are the sequences that finished in it."""

    def __init__(self, scheduler: VllmScheduler, step: Step, now_ns: int) -> None:
        self._scheduler = scheduler
        self._step = step
        self._now_ns = now_ns
        self._outputs: list[TokenOutput] = []
        self.first_tokens: list[VllmSequence] = []
        self.ended: list[VllmSequence] = []

    def run(self) -> list[TokenOutput]:
        self._decode()
        for sequence, tokens in self._step.prefilling:
            if sequence.run_order >= 0 and sequence.abort_step < 0:
                self._prefill(sequence, tokens)
        if not self._scheduler.pacing.lock_step:
            self._await_turns()
        return self._outputs

    def _decode(self) -> None:
        append = self._outputs.append
        for sequence in self._step.decoding:
            quiet = sequence.quiet
            if quiet > 1:
                sequence.quiet = quiet - 1
                append(next(sequence.feed))
            elif sequence.run_order >= 0 and sequence.abort_step < 0:
                self._decode_last_planned(sequence)
            else:
                self._scheduler.kv_tokens -= 1
        self._scheduler.kv_tokens += len(self._step.decoding)

    def _decode_last_planned(self, sequence: VllmSequence) -> None:
        if sequence.quiet:
            sequence.quiet = 0
            self._outputs.append(next(sequence.feed))
            self._scheduler.publish(sequence)
            sequence.next_block(self._scheduler.config.block_size)
        else:
            sequence.computed_at_end += 1
            self._scheduler.publish(sequence)
            self._emit(sequence)

    def _prefill(self, sequence: VllmSequence, tokens: int) -> None:
        sequence.computed_at_end += tokens
        self._scheduler.kv_tokens += tokens
        self._scheduler.publish(sequence)
        if sequence.computed_at_end == sequence.num_tokens:
            self._scheduler.log.record(sequence, Event.FIRST_TOKEN, self._now_ns)
            if sequence.prefilling:
                sequence.prefilling = False
                self.first_tokens.append(sequence)
            self._emit(sequence)

    def _emit(self, sequence: VllmSequence) -> None:
        config = self._scheduler.config
        output = sequence.next_token(config.eos_token_id)
        if output.finish_reason is not None:
            self._finish(sequence, output)
            return
        self._outputs.append(output)
        sequence.plan(config.block_size)

    def _finish(self, sequence: VllmSequence, output: TokenOutput) -> None:
        """End a running sequence with its last output."""
        assert output.finish_reason is not None
        self._outputs.append(output)
        self._scheduler.remove(sequence)
        detail: dict[str, int | str] = {"reason": output.finish_reason.value, "output_tokens": len(sequence.output)}
        self._scheduler.log.record(sequence, Event.FINISH, self._now_ns, detail)
        self.ended.append(sequence)

    def _await_turns(self) -> None:
        scheduler = self._scheduler
        begun = [sequence for sequence, _tokens in self._step.prefilling if sequence.state is State.DECODE]
        scheduler.await_next_tokens((*self._step.decoding, *begun), self._now_ns)
        for sequence, _tokens in self._step.prefilling:
            if sequence.state is State.PREFILL:
                scheduler.await_turn(sequence, self._now_ns)
