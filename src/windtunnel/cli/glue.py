"""What commands share: clean ends on Ctrl-C and SIGTERM, and errors with exit code 2."""

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from windtunnel.cli.exits import USAGE

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")
ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command that reads its own flags."""


def fail(message: str) -> NoReturn:
    """A usage or environment error: the message on stderr, exit code 2."""
    from windtunnel.lab.redact import hide_passwords

    print(f"windtunnel: {hide_passwords(message)}", file=sys.stderr)
    raise typer.Exit(USAGE)


def run_stoppable(work: "Callable[[asyncio.Event], Awaitable[Result]]") -> Result:
    """Run `work` to its end. The first SIGINT or SIGTERM sets its stop event; the second cancels it."""
    import asyncio
    import signal

    async def main() -> Result:
        stop = asyncio.Event()
        task = asyncio.ensure_future(work(stop))
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if stop.is_set():
                task.cancel()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                if stop.is_set():
                    signal.signal(number, signal.SIG_IGN)  # what there is is being written

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        fail("stopped")
