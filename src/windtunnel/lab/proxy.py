"""A proxy for experiments: `python -m windtunnel.lab.proxy --port P --upstream-port Q [--keep-upstream] -- COMMAND…`.

Starts COMMAND, which serves on the upstream port, and copies every connection there and back. It ends the upstream
connection when its client leaves; with `--keep-upstream` it goes on reading the answer instead, as proxies do that notice a
departure only when they write (clients reference §1.3).
"""

import argparse
import asyncio
import signal
from contextlib import suppress

READ_BYTES = 65_536
IDLE_S = 2.0
"""A kept upstream connection is closed when nothing has come for so long."""
LOST = (OSError, asyncio.IncompleteReadError)


class Proxy:
    def __init__(self, upstream_port: int, *, keep_upstream: bool) -> None:
        self._port = upstream_port
        self._keep = keep_upstream

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client connection."""
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        asking = asyncio.ensure_future(_copy(reader, up_writer))
        answering = asyncio.ensure_future(_copy(up_reader, writer))
        try:
            await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
            if self._keep and not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                await _drain(up_reader)
        finally:
            for task in (asking, answering):
                task.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
            writer.close()
            up_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(*LOST):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


async def _drain(reader: asyncio.StreamReader) -> None:
    with suppress(TimeoutError, *LOST):
        while await asyncio.wait_for(reader.read(READ_BYTES), IDLE_S):
            pass


async def main(arguments: argparse.Namespace) -> None:
    """Until SIGTERM or the upstream's end."""
    upstream = await asyncio.create_subprocess_exec(*arguments.command)
    proxy = Proxy(arguments.upstream_port, keep_upstream=arguments.keep_upstream)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", arguments.port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stopping, ended = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(upstream.wait())
    await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    if upstream.returncode is None:
        upstream.terminate()
        await ended
    stopping.cancel()


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="windtunnel.lab.proxy")
    out.add_argument("--port", type=int, required=True)
    out.add_argument("--upstream-port", type=int, required=True)
    out.add_argument("--keep-upstream", action="store_true")
    out.add_argument("command", nargs="+")
    return out


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
