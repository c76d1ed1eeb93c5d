"""What a peer is, as data: how it is started, in front of which workers, and what is tried there."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

NOT_HERE = "–"
"""The row means nothing in this mode."""


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
    registers: bool = False
    """The router takes its workers by `POST /workers` after its start."""
    balanced: bool = True
    """Equal requests reach every worker."""
    random: bool = False
    """A worker is drawn for each request, and one that has failed is left out for a while."""
    config: str = ""
    """The text of a file, with the same places as `words`, where it is `{config}`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: int = 1
    """A factor of every bound on a wait, but of the one within which a lost client's request is freed."""
    pooling: bool = False
    """Its workers give vectors, not text."""
    connector: str = ""
    """Of a vLLM pair that has not NIXL's: a key of `_ROLES`."""
    not_run: str = ""
    """Why it is not tried; such a column is told as it is."""

    @property
    def pd(self) -> bool:
        return "prefill" in self.roles

    @property
    def legs_at_once(self) -> bool:
        """Prefill and decode get a request at the same time, as SGLang's do; vLLM's follow each other."""
        return self.pd and self.engine == "sglang"

    def serve_flags(self, role: str, port: int, bootstrap_port: int) -> list[str]:
        """Of `windtunnel serve`, as they are tried."""
        return ["wt-model", *_TRIED, *_TRIED_BY_ENGINE[self.engine, role], *self.shown_flags(role, port, bootstrap_port)]

    def plain_flags(self, role: str, port: int, bootstrap_port: int) -> list[str]:
        """Of a server whose times are its own."""
        return ["wt-model", *self.shown_flags(role, port, bootstrap_port), "--disable-access-log"]

    def shown_flags(self, role: str, port: int, bootstrap_port: int, events_port: int = 0) -> list[str]:
        """Those of them that the mode needs. Events of port 0 are published on a free one."""
        words = f"--engine {self.engine} --port {port} {_ROLES[self.connector or self.engine, role]}"
        return [
            *words.replace("BOOTSTRAP", str(bootstrap_port)).replace("PORT", str(port)).split(),
            *(flag.replace("EVENTS_PORT", str(events_port)) for flag in self.flags),
        ]


_ROLES = {
    ("vllm", "worker"): "",
    (
        "vllm",
        "prefill",
    ): '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_producer"} --nixl-side-channel-port 0',
    (
        "vllm",
        "decode",
    ): '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_consumer"} --nixl-side-channel-port 0',
    ("mooncake", "worker"): "",
    (
        "mooncake",
        "prefill",
    ): '--kv-transfer-config {"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"prefill-PORT"} '
    "--mooncake-bootstrap-port BOOTSTRAP",
    ("mooncake", "decode"): '--kv-transfer-config {"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}',
    ("sglang", "worker"): "",
    ("sglang", "prefill"): "--disaggregation-mode prefill --disaggregation-bootstrap-port BOOTSTRAP",
    ("sglang", "decode"): "--disaggregation-mode decode",
}
_SMALL = ("--max-model-len", "32768")
_TRIED = ("--disable-access-log", "--time-scale", "20", "--itl", "20ms")
_TRIED_BY_ENGINE = {
    ("vllm", "worker"): _SMALL,
    ("vllm", "prefill"): _SMALL,
    ("vllm", "decode"): _SMALL,
    ("sglang", "worker"): ("--context-length", "32768"),
    ("sglang", "prefill"): ("--context-length", "32768", "--disaggregation-bootstrap-timeout", "20"),
    ("sglang", "decode"): ("--context-length", "32768", "--disaggregation-waiting-timeout", "20"),
}
"""A small context, and short waits for a leg that never comes."""


BLOCK_SIZE = 16
KV_EVENTS = (
    *("--block-size", str(BLOCK_SIZE), "--enable-scale-out", "--dev-mode", "--kv-events-config"),
    '{"enable_kv_cache_events":true,"endpoint":"tcp://[::ffff:127.0.0.1]:EVENTS_PORT"}',
)
"""A vLLM worker whose KV events a router can subscribe to, and whose chats it can have rendered."""


@dataclass(frozen=True)
class Setup:
    """A row of the page's second table: one thing that needs a router and workers of its own."""

    row: str
    mode: Mode
    probe: Callable[[Any], Awaitable[str]]
    thorough: bool = False
    """Tried by `make compat` only, for the time it takes."""


class Trial(Protocol):
    """What is tried with a peer that is no router: one run of it against one server gives a cell for each row."""

    @property
    def rows(self) -> Sequence[str]: ...

    async def run(self, mode: Mode, program: str) -> dict[str, str]: ...


@dataclass(frozen=True)
class Peer:
    """One page. `program` is looked for by `tests.compat.peers`; `package` says whose version is printed;
    where it is empty, the program tells its own."""

    name: str
    package: str
    program: str
    modes: tuple[Mode, ...] = ()
    setups: tuple[Setup, ...] = ()
    trial: Trial | None = None
    """In place of the routers' table."""
