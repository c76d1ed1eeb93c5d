"""The simulator as a process, configured like the servers that were recorded (see the golden README)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.ports import free_port

READY_S = 30.0
STOP_S = 10.0

_COMMON = (
    "--model tiny-llama --max-model-len 2048 --seed 0 --block-size 32 --num-gpu-blocks-override 320 --vllm-version 0.32.0 "
    "--disable-access-log"
).split()
_MAIN = (
    "--max-num-seqs 16 --enable-prefix-caching --lora-modules tiny-lora=tiny-lora --enable-prompt-tokens-details "
    "--enable-server-load-tracking --enable-auto-tool-choice --tool-call-parser hermes"
).split()
_KV_EVENTS = {
    "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557",
    "replay_endpoint": "tcp://127.0.0.1:5558", "topic": "kv",
}  # fmt: skip
_VARIANT_B = (
    "--max-loras 2 --served-model-name tiny-llama tiny-alias --api-key sk-one sk-two --enable-request-id-headers "
    "--enable-scale-out --enable-tokenizer-info-endpoint --enable-per-request-metrics --trust-request-chat-template "
    "--reasoning-parser qwen3 --itl 1ms"
).split()
_VARIANT_C = (
    "--max-num-seqs 2 --max-num-queued-reqs 6 --enable-force-include-usage --return-tokens-as-token-ids "
    "--disable-fastapi-docs --no-enable-prefix-caching"
).split()


@dataclass(frozen=True, slots=True)
class Recorded:
    """How one recorded server was started, and which groups of cases ran against it."""

    name: str
    groups: tuple[str, ...]
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


SERVERS: tuple[Recorded, ...] = (
    Recorded(
        "main",
        ("probe", "tokenize", "completions", "chat", "responses", "messages", "misc", "raw_http", "tools_extra"),
        (*_COMMON, *_MAIN, "--kv-events-config", json.dumps(_KV_EVENTS)),
        {"PYTHONHASHSEED": "0"},
    ),
    Recorded(
        "variant_b",
        ("variant_b",),
        (*_COMMON, *_MAIN, *_VARIANT_B, "--allowed-origins", '["*"]'),
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        },
    ),
    Recorded("variant_c", ("variant_c",), (*_COMMON, *_VARIANT_C)),
)


@contextlib.contextmanager
def running(recorded: Recorded, folder: Path, responses: str) -> Iterator[int]:
    """Start the server, wait until it answers, yield its port, stop it by its pid."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "responses.jsonl").write_text(responses)
        port = free_port()
        log = (Path(scratch) / "server.log").open("wb")
        flags = [*recorded.flags, "--tokenizer", str(folder), "--port", str(port)]
        command = [sys.executable, "-m", "windtunnel", "serve", *flags, "--responses", str(Path(scratch) / "responses.jsonl")]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **recorded.env})
        try:
            _wait_ready(process, port, Path(scratch) / "server.log")
            yield port
        finally:
            _stop(process)
            log.close()


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server did not listen within {READY_S:.0f} s:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
