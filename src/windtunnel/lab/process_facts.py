"""What Linux says about the server's process, where it runs on this machine and its id is known. Elsewhere: nothing."""

import os
from collections.abc import Mapping
from pathlib import Path

PROCESS_LIMIT = 64


def process_facts(pid: int) -> Mapping[str, float]:
    """Resident bytes, threads, file descriptors and sockets of a process and its descendants, added up."""
    total: dict[str, float] = {}
    for one in _family(pid):
        for key, value in _facts(one).items():
            total[key] = total.get(key, 0.0) + value
    return total


def alive(pid: int) -> bool:
    """A process that has ended and waits to be collected is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _family(pid: int) -> list[int]:
    family = [pid]
    for one in family:
        if len(family) < PROCESS_LIMIT:
            try:
                family += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
            except OSError:
                continue
    return family


def _facts(pid: int) -> dict[str, float]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return {}
    return {
        "rss_bytes": float(int(fields[21]) * os.sysconf("SC_PAGE_SIZE")),
        "threads": float(fields[17]),
        "fds": float(len(names)),
        "sockets": float(sum(_is_socket(f"/proc/{pid}/fd/{name}") for name in names)),
    }


def _is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except OSError:
        return False
