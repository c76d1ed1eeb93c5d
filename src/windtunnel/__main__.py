"""The entry: Ctrl-C ends the command cleanly from the first import on."""

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""As shells say it: 128 + SIGINT."""


def main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as shells leave it to what runs in the background
        signal.signal(signal.SIGINT, _leave)
    from windtunnel.cli.main import main as run

    run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Nothing has begun, so there is nothing to end. An exception could come up inside an import, which may swallow it."""
    os.write(2, b"windtunnel: interrupted before it began\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
