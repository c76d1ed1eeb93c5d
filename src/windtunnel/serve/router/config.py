"""What `windtunnel router` is told."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from windtunnel.wire.sglang.pairing import PrefillAddress


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Either workers (plain) or prefills and decodes. Checked as it is made: ValueError."""

    host: str = "127.0.0.1"
    port: int = 30000
    workers: tuple[str, ...] = ()
    prefills: tuple[PrefillAddress, ...] = ()
    decodes: tuple[str, ...] = ()
    pd: bool = False
    body_bytes: int = 64 * 1024 * 1024
    connections: int = 4096
    request_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.pd and not (self.prefills and self.decodes):
            raise ValueError("--pd-disaggregation needs at least one --prefill URL [PORT] and one --decode URL")
        if not self.pd and not self.workers:
            raise ValueError("--worker-urls names no worker: write one or more http://HOST:PORT")
        if self.pd and self.workers:
            raise ValueError("--worker-urls and --pd-disaggregation exclude each other")


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
