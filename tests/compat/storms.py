"""`python -m tests.compat.storms`: the lab between clients and each router, workers and router as processes.

Every mode of every peer is stormed four times: streams left at their third token, whole answers left, and both left before
there is a token. Each line names the findings; a document of each storm is written to `--out`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.compat import peers
from tests.compat.all import PEERS
from tests.compat.modes import Mode, Peer
from tests.compat.site import START_S, command, register
from windtunnel.ports import free_port

PACE = ("--disable-access-log", "--ttft", "20ms", "--itl", "{itl}")
SLOW = ("--disable-access-log", "--ttft", "2s", "--itl", "{itl}")
ITL = "5ms"
_AT_ITS_PROMPT = "--when prefill --set state_patience=20s --max-tokens 1500"
"""As the worker says: a router may take its time before it asks one. The answer lasts longer than SGLang may take to look."""
_COMMON = "--victims 10 --rounds 2 --survivors 4 --bystanders 12 --later 8 --quiet-deadline 20s --set known=3"
STORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "streams at their third token": (PACE, "--how fin,rst --when tokens:3"),
    "whole answers": (PACE, "--how fin,rst --no-stream --max-tokens 800 --when after:300ms"),
    "streams before the first token": (SLOW, f"--how fin,rst {_AT_ITS_PROMPT}"),
    "whole answers before the first token": (SLOW, f"--how fin,rst --no-stream {_AT_ITS_PROMPT}"),
}
STORM_S = 300


@contextlib.asynccontextmanager
async def _process(*words: str, log: Path, environment: Mapping[str, str]) -> AsyncIterator[None]:
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*words, stdout=out, stderr=out, env=os.environ | environment)
        try:
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def fleet(mode: Mode, program: str, pace: Sequence[str], log: Path) -> AsyncIterator[tuple[str, list[str]]]:
    """(the router's URL, the workers' URLs)."""
    places: dict[str, Any] = {"port": free_port(), "metrics_port": free_port()}
    urls = []
    async with contextlib.AsyncExitStack() as stack:
        for number, role in enumerate(mode.roles):
            port, bootstrap, grpc = free_port(), free_port(), free_port()
            urls.append(f"http://127.0.0.1:{port}")
            spoken = f"grpc://127.0.0.1:{grpc}" if mode.grpc else urls[-1]
            places |= {f"url{number}": spoken, f"bootstrap{number}": bootstrap}
            flags = [*mode.shown_flags(role, port, bootstrap), *pace, *(["--grpc-port", str(grpc)] if mode.grpc else [])]
            serve = (sys.executable, "-m", "windtunnel", "serve", "wt-model", *flags)
            await stack.enter_async_context(_process(*serve, log=log, environment={}))
        patience_s = START_S * mode.patience
        await _up([f"{url}/health" for url in urls], patience_s)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = command(mode, program, places, folder)
        await stack.enter_async_context(_process(*words, log=log, environment=mode.environment))
        router = f"http://127.0.0.1:{places['port']}"
        if mode.registers:
            await _up([f"{router}/liveness"], patience_s)
            async with httpx.AsyncClient(trust_env=False) as client:
                await register(client, router, mode, [(url, places[f"bootstrap{at}"]) for at, url in enumerate(urls)])
        await _up([f"{router}/v1/models"], patience_s)
        await _answers(router, patience_s)
        yield router, urls


async def _up(urls: Sequence[str], patience_s: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(patience_s):
        for url in urls:
            while not await _ok(client.get(url)):
                await asyncio.sleep(0.05)


async def _answers(router: str, patience_s: int) -> None:
    body = {"model": "wt-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with httpx.AsyncClient(trust_env=False, timeout=patience_s) as client, asyncio.timeout(patience_s):
        while not await _ok(client.post(f"{router}/v1/chat/completions", json=body)):
            await asyncio.sleep(0.05)


async def _ok(asking: Any) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool((await asking).status_code == 200)
    return False


async def storm(router: str, workers: Sequence[str], words: str) -> dict[str, Any]:
    metrics = [word for url in workers for word in ("--metrics-url", f"{url}/metrics")]
    told = ["-m", "windtunnel", "storm", router, "--model", "wt-model", *metrics, *words.split(), *_COMMON.split(), "--json"]
    process = await asyncio.create_subprocess_exec(sys.executable, *told, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(STORM_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return {"findings": [], "failed": f"no end in {STORM_S} s"}
    return json.loads(output) if output.strip() else {"findings": [], "failed": process.returncode}


def matrix(options: argparse.Namespace) -> Iterator[tuple[Peer, Path, Mode, str]]:
    """Every storm of every mode of every router that is wanted and installed."""
    for peer in PEERS:
        program = peers.find(peer.program)
        if program is None or peer.trial is not None or (options.peer and peer.name not in options.peer):
            continue
        for mode in peer.modes:
            if options.mode in mode.name and not mode.not_run:
                yield from ((peer, program, mode, name) for name in STORMS if options.storm in name)


async def run(options: argparse.Namespace) -> None:
    for peer, program, mode, name in matrix(options):
        label = f"{peer.name} {peers.version(peer.package, program)}, {mode.name}, {name}, {options.api}"
        slug = label.replace(" ", "-").replace(",", "").replace("/", "")
        pace, words = STORMS[name]
        told_pace = [word.format(itl=options.itl) for word in pace]
        async with fleet(mode, str(program), told_pace, options.out / f"{slug}.log") as (router, urls):
            told = await storm(router, urls, f"{words} --api {options.api}")
        (options.out / f"{slug}.json").write_text(json.dumps(told, indent=1))
        found = [f"{one['name']} ({'; '.join(one['evidence'])})" for one in told["findings"]]
        print(f"{label}: {' | '.join(found) or told.get('failed') or 'nothing'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.storms", description=__doc__)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--mode", default="", help="only modes whose name has this in it")
    parser.add_argument("--storm", default="", help="only storms whose name has this in it")
    parser.add_argument("--api", default="completions", help="of victims, survivors and later streams")
    parser.add_argument("--itl", default=ITL, help="between tokens; where the router is slower, the storm is about that")
    parser.add_argument("--out", type=Path, default=Path("out/router-storms"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
