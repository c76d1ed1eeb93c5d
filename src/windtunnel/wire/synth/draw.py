"""A small deterministic stream of choices: a pure function of its seed, without the random module."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Draw:
    """splitmix64 (Steele, Lea, Flood 2014). Mutable; owned by one synthesis."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        self._state = (self._state + _GOLDEN) & _MASK
        value = self._state
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        return (value ^ (value >> 31)) % limit

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)
