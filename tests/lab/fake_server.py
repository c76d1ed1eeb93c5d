"""A tiny server that speaks just enough OpenAI and vLLM metrics for the lab's own tests, with switchable defects.

Run as a script it is an arm of an experiment: `fake_server.py --port N [--defect NAME]…`. Each defect is deterministic
and as small as possible; the finding it must raise is the table `DEFECTS`.
"""

import argparse
import asyncio
import json
import os
import re
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.core import oracle

DEFECTS = {
    "bystander-500": "bystander_error",
    "wrong-status-valid-body": "bystander_error",
    "crossed": "crossed_stream",
    "leak-slot": "slot_leak",
    "leak-kv": "kv_leak",
    "leak-queue": "queue_orphan",
    "stale-gauge": "stale_gauge",
    "no-done": "unterminated_stream",
    "cut": "unterminated_stream",
    "lose-word": "corrupt_stream",
    "repeat-word": "corrupt_stream",
    "short": "corrupt_stream",
    "hidden-error": "hidden_error",
    "deaf": "zombie_tokens",
    "wedge": "wedged",
    "drift": "gauge_drift",
    "miscount": "cancel_miscounted",
    "abort-others": "collateral_abort",
    "leak-transfer": "transfer_orphan",
}
"""Defect → the finding that it must raise."""
EXIT_STATUS = 7
"""With which it ends by itself where it is told to."""


@dataclass
class FakeServer:
    """One server on one port. Harm begins with the first client that leaves, so that a plain probe is always answered."""

    defects: frozenset[str] = frozenset()
    itl_s: float = 0.002
    spread_s: float = 0.0
    """So much slower is each stream than the one before."""
    silent_after: int | None = None
    """A stream of more than a hundred tokens says no more after so many, until it `goes_on`."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    generated: int = 0
    exit_after_tokens: int = 0
    """So many tokens, then the whole process ends; 0: never."""
    finished: int = 0
    left: int = 0
    harmed: int = 0
    stale: int = 0
    drifted: int = 0
    live: dict[str, str] = field(default_factory=dict)
    """Request id → state, for `/debug/requests`; filled by tests."""
    shown: list[dict[str, str]] = field(default_factory=list)
    """Further entries of `/debug/requests`."""
    held: list[str] = field(default_factory=list)
    """Request ids, for `/debug/disaggregation`; filled by tests."""
    debug: bool = False
    ids: dict[asyncio.StreamWriter, str] = field(default_factory=dict)
    seen_ids: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    identities: list[int] = field(default_factory=list)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def has(self, defect: str) -> bool:
        """Whether this defect is on and somebody has left already."""
        return defect in self.defects and self.left > 0

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> int:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", port, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            found = re.search(r"\r\nx-request-id: (\S+)", head)
            self.ids[writer] = found[1] if found else "none"
            await self.route(head.split(" ")[1], body, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            self.left += 1
        except asyncio.CancelledError:
            return  # `stop` ends it; the streams module of Python 3.11 logs a cancelled handler as an error
        finally:
            self.ids.pop(writer, None)
            writer.close()

    async def route(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain: dict[str, Callable[[], str]] = {
            "/health": lambda: "",
            "/metrics": self.metrics,
            "/v1/models": lambda: json.dumps({"data": [{"id": "fake"}]}),
        }
        if path == "/metrics" and "no-metrics" in self.defects:
            await answer(writer, 404, "")
        elif path == "/debug/requests" and self.debug:
            live = [{"request_id": key, "state": state} for key, state in self.live.items()]
            await answer(writer, 200, json.dumps({"live": [*live, *self.shown]}))
        elif path == "/debug/disaggregation" and self.debug:
            await answer(writer, 200, json.dumps([{"holds": [{"request_id": one} for one in self.held]}]))
        elif path == "/abort_requests":
            self.aborted |= set(json.loads(body)["request_ids"])
            await answer(writer, 200, "{}")
        elif path.startswith(("/debug/", "/version")) or (path == "/v1/completions" and "chat-only" in self.defects):
            await answer(writer, 404, "{}")
        elif path in plain:
            status = 500 if path == "/metrics" and self.harms("bystander-500") else 200
            await answer(writer, 404 if path == "/metrics" and self.harms("wrong-status-valid-body") else status, plain[path]())
        else:
            await self.generate(json.loads(body), path.endswith("chat/completions"), reader, writer)

    def harms(self, defect: str) -> bool:
        """The first five bystanders after a departure are harmed."""
        self.harmed += self.has(defect)
        return self.has(defect) and self.harmed <= 5

    def metrics(self) -> str:
        if "leak-transfer" in self.defects:
            return self.sglang_metrics()
        lines = {
            'vllm:num_requests_running{engine="0"}': self.running
            + self.drifted
            + (self.stale if "stale-gauge" in self.defects else 0),
            'vllm:num_requests_waiting{engine="0"}': self.waiting,
            'vllm:kv_cache_usage_perc{engine="0"}': self.kv + self.running * 0.01,
            'vllm:generation_tokens_total{engine="0"}': self.generated,
            'vllm:request_success_total{engine="0",finished_reason="length"}': self.finished,
        }
        return "# HELP x y\n" + "".join(f"{name} {value}\n" for name, value in lines.items())

    def sglang_metrics(self) -> str:
        """A prefill worker's: whoever leaves stays in the queue of transfers."""
        names = ("num_running_reqs", "num_queue_reqs", "token_usage", "num_prefill_inflight_queue_reqs")
        values = (self.running, self.waiting, self.running * 0.01, self.left)
        return "".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in zip(names, values, strict=True))

    async def generate(
        self, ask: dict[str, object], chat: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.has("wedge"):
            await asyncio.sleep(3600)
        messages = ask.get("messages")
        prompt = messages[0]["content"] if isinstance(messages, list) else ask["prompt"]
        identity = oracle.identity_of_marker(str(prompt))
        assert identity is not None
        self.identities.append(identity)
        words = self.words(identity, int(str(ask["max_tokens"])))
        self.seen_ids.append(self.ids[writer])
        self.running += 1
        self.stale = 0
        itl_s = self.itl_s + self.spread_s * len(self.identities)
        working = asyncio.ensure_future(
            self.stream(words, chat, itl_s, writer) if ask["stream"] else self.whole(words, chat, writer)
        )
        gone = asyncio.ensure_future(reader.read())
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.exception():
            self.running -= 1
            self.finished += int(str(ask.get("n", 1)))
        else:
            await self.departed(working)
        gone.cancel()

    async def departed(self, working: "asyncio.Future[None]") -> None:
        self.left += 1
        if "deaf" in self.defects:
            await asyncio.gather(working, return_exceptions=True)
            self.finished += 1
        working.cancel()
        self.running -= "leak-slot" not in self.defects
        self.drifted += "drift" in self.defects
        self.finished += 2 * ("miscount" in self.defects)
        self.kv += 0.1 * ("leak-kv" in self.defects)
        self.waiting += "leak-queue" in self.defects
        self.stale += 1

    def words(self, identity: int, count: int) -> list[str]:
        words = oracle.words(identity, 0, count)
        if self.has("crossed") and len(self.identities) > 1:
            words[count // 2 :] = oracle.words(self.identities[-2], count // 2, count)[: count - count // 2]
        if self.has("lose-word"):
            del words[1]
        if self.has("repeat-word"):
            words[2:2] = words[0:2]
        return words[: count - 1] if self.has("short") else words

    async def whole(self, words: list[str], chat: bool, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.itl_s * len(words))
        self.generated += len(words)
        text = "".join(f" {word}" for word in words)
        choice = {"index": 0, **({"message": {"content": text}} if chat else {"text": text}), "finish_reason": "length"}
        await answer(writer, 200, json.dumps({"choices": [choice]}))

    async def stream(self, words: list[str], chat: bool, itl_s: float, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if self.has("hidden-error"):
            chunk(writer, json.dumps({"error": {"message": "engine says no", "code": 500}}))
            words = []
        request_id = self.ids[writer]
        for at, word in enumerate(words):
            if at == self.silent_after and len(words) > 100:
                await self.goes_on.wait()
            await asyncio.sleep(itl_s)
            self.generated += 1
            if 0 < self.exit_after_tokens <= self.generated:
                os._exit(EXIT_STATUS)
            if f"{request_id}-0" in self.aborted or (at == 2 and self.has("abort-others")):
                chunk(writer, json.dumps({"id": request_id, "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}))
                self.finished -= 1  # what was aborted is not counted when the stream ends
                break
            if at == 3 and self.has("cut"):
                writer.transport.abort()
                return
            last = at == len(words) - 1
            text = {"delta": {"content": f" {word}"}} if chat else {"text": f" {word}"}
            chunk(
                writer,
                json.dumps({"id": request_id, "choices": [{"index": 0, **text, "finish_reason": "length" if last else None}]}),
            )
        if not self.has("no-done"):
            chunk(writer, "[DONE]")
        if not writer.transport.is_closing():
            writer.write(b"0\r\n\r\n")


def chunk(writer: asyncio.StreamWriter, data: str) -> None:
    if writer.transport.is_closing():
        return
    frame = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))


async def answer(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    data = body.encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
    await writer.drain()


async def main(arguments: argparse.Namespace) -> None:
    server = FakeServer(frozenset(arguments.defect), arguments.itl_ms / 1e3)
    server.exit_after_tokens = arguments.exit_after_tokens
    await server.start(arguments.port)
    if arguments.pids:
        (arguments.pids / str(os.getpid())).touch()
    for _ in range(arguments.races):
        print("WARNING: DATA RACE", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--defect", action="append", default=[], choices=sorted(DEFECTS))
    parser.add_argument("--itl-ms", type=float, default=2.0)
    parser.add_argument("--exit-after-tokens", type=int, default=0)
    parser.add_argument("--races", type=int, default=0)
    parser.add_argument("--pids", type=Path, help="a folder in which this process leaves its id as a file name")
    asyncio.run(main(parser.parse_args()))
