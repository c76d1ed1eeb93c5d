"""Text for a regex, or for a small context-free grammar in the GBNF or Lark notation."""

from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.grammar import Grammar
from windtunnel.wire.synth.regex import Regex

MAX_TRIES = 40


def matching_text(kind: str, pattern: str, seed: int) -> str:
    """A text that the whole pattern takes. `kind` is `regex` or `grammar`; raises SynthesisError."""
    draw = Draw(seed)
    return _for_regex(Regex(pattern), draw) if kind == "regex" else Grammar(pattern).text(draw)


def _for_regex(regex: Regex, draw: Draw) -> str:
    for _ in range(MAX_TRIES):
        text = regex.text(draw)
        if regex.full_match(text):
            return text
    raise SynthesisError("Grammar error: no text was found for this regex")
