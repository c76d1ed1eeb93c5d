"""What each sequence "generates": the server's generation mode, unless the request fixes the answer."""

from collections.abc import Sequence

from windtunnel.core import oracle
from windtunnel.core.request import TokenSource
from windtunnel.core.sources import EchoSource, OracleSource, SequenceSource
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.serve.config import GenerationConfig
from windtunnel.wire.family import Generation, PromptPlan

_WINDOW_TOKENS = 4096
_MARKER_TOKENS_MAX = 40
"""No marker has more characters, so none has more tokens."""
SENTENCES = (
    "The simulator answers at once and without a model.",
    "Every token of this sentence was chosen long before you asked.",
    "A client that leaves is noticed, and its blocks are free within a step.",
    "Nothing here was computed on a GPU, and nothing needed to be.",
    "Queues grow, caches fill, and the gauges tell the truth about both.",
    "If this stream ends early, somebody between us closed it.",
)


class SourceMaker:
    """Makes the token source of one sequence. Pure in (request, prompt index, choice index)."""

    def __init__(self, config: GenerationConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._sentences = [tuple(tokenizer.encode(" " + text, add_special_tokens=False)) for text in SENTENCES]

    def __call__(self, generation: Generation, prompt_index: int, child: int) -> TokenSource:
        recorded = generation.recorded
        tokens = None if recorded is None else recorded[prompt_index * generation.sampling.n + child]
        if tokens is not None:
            return SequenceSource(tokens)
        if generation.answer_text is not None:
            return SequenceSource(self._tokenizer.encode(generation.answer_text, add_special_tokens=False))
        prompt, sampling = generation.prompts[prompt_index], generation.sampling
        if self._config.mode == "echo":
            return EchoSource(prompt.token_ids, ignore_eos=sampling.ignore_eos, min_tokens=sampling.min_tokens)
        identity = oracle.child_identity(self.identity(prompt), child)
        if self._config.mode == "sentence":
            sentence = self._sentences[identity % len(self._sentences)]
            return SequenceSource(sentence, ignore_eos=sampling.ignore_eos, min_tokens=sampling.min_tokens)
        length = None if sampling.ignore_eos else oracle.natural_length(identity, *self._config.natural_length)
        return OracleSource(identity, self._tokenizer.oracle_token_ids, length, min_tokens=sampling.min_tokens)

    def identity(self, prompt: PromptPlan) -> int:
        """The prompt's identity: its marker, in text or in token ids, or else a hash of its tokens."""
        if prompt.identity is not None:
            return prompt.identity
        marked = self._marker_in(prompt.token_ids) if prompt.text is None else oracle.identity_of_marker(prompt.text)
        if marked is not None:
            return marked
        identity = oracle.identity_of_tokens(prompt.token_ids)
        return oracle.identity_with_media(identity, [item.identifier for item in prompt.media]) if prompt.media else identity

    def _marker_in(self, token_ids: Sequence[int]) -> int | None:
        """The last marker in the text of these tokens, looked for from the end, window by window."""
        for stop in range(len(token_ids), 0, -_WINDOW_TOKENS):
            window = token_ids[max(0, stop - _WINDOW_TOKENS - _MARKER_TOKENS_MAX) : stop]
            marked = oracle.identity_of_marker(self._tokenizer.decode(window, skip_special_tokens=False))
            if marked is not None:
                return marked
        return None
