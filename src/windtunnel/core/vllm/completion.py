"""What follows the model's part of a step: tokens, stops, published blocks (vLLM reference §5.2)."""

from itertools import repeat
from operator import attrgetter
from typing import cast

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import TokenOutput
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step

_feed = attrgetter("feed")


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
        """Most sequences have a prepared output and nothing else to do: they cost no line of Python."""
        decoding = self._step.decoding
        outputs: list[TokenOutput | None] = list(map(next, map(_feed, decoding), repeat(None)))
        self._scheduler.kv_tokens += len(decoding)
        closer = [at for at, output in enumerate(outputs) if output is None]
        for at in closer:
            outputs[at] = self._decode_closely(decoding[at])
        for at in reversed(closer):
            if outputs[at] is None:
                del outputs[at]
        self._outputs = cast(list[TokenOutput], outputs)

    def _decode_closely(self, sequence: VllmSequence) -> TokenOutput | None:
        """The last token of a block, or one behind which nothing is planned. None: the sequence has left meanwhile."""
        if sequence.run_order < 0 or sequence.abort_step >= 0:
            self._scheduler.kv_tokens -= 1
            return None
        if not sequence.block_end:
            sequence.computed_at_end += 1
            self._scheduler.publish(sequence)
            return self._emit(sequence)
        output = sequence.end_block()
        self._scheduler.publish(sequence)
        sequence.next_block(self._scheduler.config.block_size)
        return output

    def _prefill(self, sequence: VllmSequence, tokens: int) -> None:
        sequence.computed_at_end += tokens
        self._scheduler.kv_tokens += tokens
        self._scheduler.publish(sequence)
        if sequence.computed_at_end == sequence.num_tokens:
            self._scheduler.log.record(sequence, Event.FIRST_TOKEN, self._now_ns)
            if sequence.prefilling:
                sequence.prefilling = False
                self.first_tokens.append(sequence)
            output = self._emit(sequence)
            if output is not None:
                self._outputs.append(output)

    def _emit(self, sequence: VllmSequence) -> TokenOutput | None:
        config = self._scheduler.config
        output = sequence.next_token(config.eos_token_id)
        if output.finish_reason is None:
            sequence.plan(config.block_size)
            return output
        return self._finish(sequence, output)

    def _finish(self, sequence: VllmSequence, output: TokenOutput) -> TokenOutput:
        """End a running sequence; its last output as it is told."""
        assert output.finish_reason is not None
        self._scheduler.remove(sequence)
        detail: dict[str, int | str] = {"reason": output.finish_reason.value, "output_tokens": len(sequence.output)}
        self._scheduler.log.record(sequence, Event.FINISH, self._now_ns, detail)
        self.ended.append(sequence)
        return output

    def _await_turns(self) -> None:
        scheduler = self._scheduler
        begun = [sequence for sequence, _tokens in self._step.prefilling if sequence.state is State.DECODE]
        scheduler.await_next_tokens((*self._step.decoding, *begun), self._now_ns)
        for sequence, _tokens in self._step.prefilling:
            if sequence.state is State.PREFILL:
                scheduler.await_turn(sequence, self._now_ns)
