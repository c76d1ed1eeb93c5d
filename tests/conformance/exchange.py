"""Raw HTTP over one socket: send recorded bytes, read what comes back. No HTTP library is in the way of the comparison."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tests.conformance.cases import Answer, Case

TIMEOUT_S = 30.0
IDLE_S = 0.4
CLOSE_S = 7.0
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RawExchange:
    """The bytes that a server sent on one connection, and whether it closed it."""

    data: bytes
    closed: bool


def send(case: Case, port: int) -> Answer:
    """Replay a case on a connection of its own."""
    with _connected(port) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request_bytes(case))
        return read_answer(connection, head_only=case.method == "HEAD")


def request_bytes(case: Case) -> bytes:
    """The request with its recorded headers in their order; the length is that of the body that is sent."""
    lines = [f"{case.method} {case.path} HTTP/1.1"]
    for name, value in case.headers:
        lines.append(f"{name}: {len(case.body) if name.lower() == 'content-length' else value}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + case.body


def send_raw(parts: list[str], port: int, *, expect_close: bool, expect_bytes: bool) -> RawExchange:
    """Send verbatim parts one after the other and read until the server closes or falls silent."""
    received = b""
    closed = False
    with _connected(port) as connection:
        for number, part in enumerate(parts):
            with contextlib.suppress(OSError):
                connection.sendall(part.encode("utf-8", "surrogateescape"))
            last = number == len(parts) - 1
            patience = CLOSE_S if last and expect_close else IDLE_S
            more, closed = _read_until_quiet(connection, patience, wait_first=expect_bytes)
            received += more
            if closed:
                break
    return RawExchange(received, closed)


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        yield connection


def _read_until_quiet(connection: socket.socket, patience_s: float, *, wait_first: bool) -> tuple[bytes, bool]:
    received = b""
    while len(received) < MAX_BYTES:
        connection.settimeout(TIMEOUT_S / 6 if wait_first and not received else patience_s)
        try:
            part = connection.recv(65536)
        except TimeoutError:
            return received, False
        except ConnectionError:
            return received, True
        if not part:
            return received, True
        received += part
    return received, False


def read_answer(connection: socket.socket, *, head_only: bool) -> Answer:
    """One answer, read to its end. Raises ValueError for one that is cut off."""
    data = b""
    while len(data) < MAX_BYTES:
        answer, _rest = split_answer(data, head_only=head_only, closed=False)
        if answer is not None:
            return answer
        part = connection.recv(65536)
        if not part:
            answer, _rest = split_answer(data, head_only=head_only, closed=True)
            if answer is None:
                raise ValueError(f"the answer is cut off after {len(data)} bytes: {data[-120:]!r}")
            return answer
        data += part
    raise ValueError(f"the answer is longer than {MAX_BYTES} bytes")


def split_answers(data: bytes) -> list[Answer]:
    """All answers of a connection's bytes, one behind the other."""
    out = []
    while data:
        answer, rest = split_answer(data, head_only=False, closed=True)
        if answer is None or rest == data:
            break
        out.append(answer)
        data = rest
    return out


def split_answer(data: bytes, *, head_only: bool, closed: bool) -> tuple[Answer | None, bytes]:
    """The first complete answer in `data`, and what follows it."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None, data
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = tuple(
        (name.strip().lower(), value.strip()) for name, _colon, value in (line.partition(":") for line in lines[1:])
    )
    fields = dict(headers)
    if head_only or status in (204, 304) or status < 200:
        return Answer(status, headers, b""), rest
    if "chunked" in fields.get("transfer-encoding", ""):
        body, after, complete = _chunks(rest)
        return (Answer(status, headers, body), after) if complete or closed else (None, data)
    size = int(fields["content-length"]) if "content-length" in fields else None
    if size is None:
        return (Answer(status, headers, rest), b"") if closed else (None, data)
    return (Answer(status, headers, rest[:size]), rest[size:]) if len(rest) >= size else (None, data)


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """De-chunked body, the bytes behind it, and whether the last chunk was there."""
    out: list[bytes] = []
    while True:
        line, newline, rest = data.partition(b"\r\n")
        if not newline:
            return b"".join(out), b"", False
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return b"".join(out), rest.removeprefix(b"\r\n"), True
        if len(rest) < size + 2:
            return b"".join(out), b"", False
        out.append(rest[:size])
        data = rest[size + 2 :]
