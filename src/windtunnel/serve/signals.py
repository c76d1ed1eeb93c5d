"""SIGINT and SIGTERM for a uvicorn server that exits with 0 when it was asked to stop, and did."""

import contextlib
import signal
from collections.abc import Callable, Generator
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Generator[None, None, None]:
    """Unlike uvicorn's own, this does not raise the signal again at the end."""
    before = {number: signal.signal(number, handler) for number in HANDLED}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)
