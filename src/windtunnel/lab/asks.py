"""Makes the requests of a storm, each with a prompt of its own that carries the oracle's marker."""

from dataclasses import replace
from itertools import count
from random import Random

from windtunnel.core import oracle
from windtunnel.core.words import WORDS
from windtunnel.lab.plan import Role, Shape
from windtunnel.lab.record import Ask

ID_PREFIX = "wt-"
"""Of every `X-Request-Id` that a storm sends."""


class AskMaker:
    """Makes requests with prompts of their own. Owns the seeded generator and the running number."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._base = self._random.getrandbits(32) << 24
        self._number = count(1)

    def ask(self, role: Role, round_: int, shape: Shape) -> Ask:
        tag = self._base + next(self._number)
        filler = " ".join(self._random.choice(WORDS) for _ in range(shape.prompt_words))
        prompt = f"{oracle.marker(tag)} {filler}"
        return Ask(tag, role, round_, shape.api, prompt, shape.max_tokens, shape.stream, shape.n, f"{ID_PREFIX}{tag:x}")

    def again(self, ask: Ask, role: Role) -> Ask:
        """The same request once more, under another id."""
        return replace(ask, role=role, request_id=f"{ID_PREFIX}{ask.tag:x}-{next(self._number)}")
