"""What `windtunnel router` is told."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from windtunnel.wire.sglang.pairing import PrefillAddress

RETRIES_LIMIT = 100


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """How vLLM pairs are made (`serve.router.sidecar`)."""

    header_only: bool = False
    """Without the prefill header there is no prefill, as with the real sidecar; otherwise the prefills take turns."""
    sampling: bool = False
    """Of several endpoints in the header a random one, not the first."""
    retries: int = 0
    """After a prefill's 502, 503 or 504."""
    retry_backoff_s: float = 0.1
    between_legs_s: float = 0.0
    """How long the prefill's answer lies before the decode request is sent."""
    decode_after_departure: bool = False
    """Send the decode request though the client has gone between the legs."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Either workers (plain) or prefills and decodes. Checked as it is made: ValueError."""

    host: str = "127.0.0.1"
    port: int = 30000
    workers: tuple[str, ...] = ()
    prefills: tuple[PrefillAddress, ...] = ()
    decodes: tuple[str, ...] = ()
    pd: bool = False
    """Pairs as SGLang's mini_lb makes them."""
    sidecar: SidecarConfig | None = None
    """Pairs as the llm-d sidecar makes them."""
    mooncake: bool = False
    """Pairs as vLLM's example proxy for Mooncake makes them."""
    body_bytes: int = 64 * 1024 * 1024
    connections: int = 4096
    request_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.pd and (self.mooncake or self.sidecar is not None):
            raise ValueError("--pd-disaggregation (SGLang) and --vllm-pd-disaggregation exclude each other")
        name = "--pd-disaggregation" if self.pd else "--vllm-pd-disaggregation"
        if self.paired and not (self.prefills and self.decodes):
            raise ValueError(f"{name} needs at least one --prefill URL [PORT] and one --decode URL")
        if not self.paired and not self.workers:
            raise ValueError("--worker-urls names no worker: write one or more http://HOST:PORT")
        if self.paired and self.workers:
            raise ValueError(f"--worker-urls and {name} exclude each other")

    @property
    def paired(self) -> bool:
        return self.pd or self.mooncake or self.sidecar is not None


def worker_url(text: str) -> str:
    """A base URL. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not a worker: write http://HOST:PORT")
    return text.rstrip("/")


def prefill_address(url: str, port: str | None) -> PrefillAddress:
    """`--prefill URL [PORT]`; the port is the bootstrap server's, `none` leaves it to the worker."""
    base = worker_url(url)
    if port is None or port.lower() == "none":
        number = None
    elif port.isdigit() and 0 < int(port) < 65536:
        number = int(port)
    else:
        raise ValueError(f"--prefill {url} {port}: the second value is the bootstrap port, 1 to 65535 or none")
    return PrefillAddress(base, urlsplit(base).hostname or "", number)
