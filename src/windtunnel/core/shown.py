"""What strangers have sent, as a log line shows it: short, on one line, and with nothing that a terminal would obey."""

import reprlib

LIMIT = 200


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict, self.maxlevel, self.maxlist, self.maxstring = 20, 3, 4, 80

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write very long numbers in decimals."""
        return super().repr_int(x, level) if x.bit_length() <= 128 else f"<a number of {x.bit_length()} bits>"


_SHORT = _Short()


def shown(told: object) -> str:
    """A short printable text as it is, everything else as Python would write it, cut to `LIMIT` characters."""
    if isinstance(told, str) and len(told) <= LIMIT and told.isprintable():
        return told
    text = _SHORT.repr(told)
    return text if len(text) <= LIMIT else f"{text[: LIMIT - 1]}…"
