"""What a peer is, as data: how it is started, in front of which workers, and what is tried there."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

ENGINE_FLAGS = {"vllm": ["--max-model-len", "32768"], "sglang": ["--context-length", "32768"]}
Join = Callable[[Any], Awaitable[None]]
"""Registers workers of a site by the router's own API."""


@dataclass(frozen=True)
class Mode:
    """One way to run a router; a column of its page.

    `words` are its command line with `{port}`, `{metrics_port}`, `{url0}`, `{bootstrap0}`, `{events0}` for those of the first
    worker, and so on. `flags` are more flags of `windtunnel serve`. Simulated time runs 20 times as fast, so that what takes a
    real server seconds (SGLang looks for lost clients every 2 s or 4 s) takes little here.
    """

    name: str
    engine: str
    words: str
    roles: tuple[str, ...] = ("worker", "worker")
    grpc: bool = False
    flags: tuple[str, ...] = ()
    join: Join | None = None
    not_run: str = ""
    """Why it is not tried; such a column is told as it is."""

    @property
    def pd(self) -> bool:
        return "prefill" in self.roles

    def serve_flags(self, role: str, port: int, bootstrap_port: int) -> list[str]:
        """Of `windtunnel serve`."""
        head = f"wt-model --engine {self.engine} --port {port} --disable-access-log --time-scale 20 --itl 20ms".split()
        head += ENGINE_FLAGS[self.engine]
        if role == "prefill":
            head += ["--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(bootstrap_port)]
        elif role == "decode":
            head += ["--disaggregation-mode", role, "--disaggregation-waiting-timeout", "10"]
        return [*head, *(flag.replace("{number}", str(port)) for flag in self.flags)]


@dataclass(frozen=True)
class Setup:
    """A row of the page's second table: one thing that needs a router and workers of its own."""

    row: str
    mode: Mode
    probe: Callable[[Any], Awaitable[str]]


@dataclass(frozen=True)
class Peer:
    """One page. `program` is looked for by `tests.compat.peers`; `package` says whose version is printed."""

    name: str
    package: str
    program: str
    modes: tuple[Mode, ...] = ()
    setups: tuple[Setup, ...] = ()
