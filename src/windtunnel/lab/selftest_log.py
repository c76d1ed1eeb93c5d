"""The runs of a self-test as they end: one JSON line each, after a first line that says of what they are.

A self-test that was stopped goes on from such a file. Its runs belong to one state of the code, one seed and one set of
defects: a file with another head is refused. A last line without an end was being written when the process died; it is cut off.
One process at a time has the file: it is locked (flock) until it is closed, or its process has ended however it did.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TextIO

import windtunnel
from windtunnel.lab.finding import Finding, Severity
from windtunnel.lab.selftest import Case, Run, Seen, Turn

FORMAT = 1
_SOURCES = (".py", ".toml", ".json")


class LogError(ValueError):
    """A file that cannot be gone on with, or would be written over."""


def head_of(cases: Sequence[Case], runs: int, seed: int) -> dict[str, Any]:
    """What all runs of one self-test have in common."""
    return {"format": FORMAT, "code": code_state(), "seed": seed, "runs": runs, "defects": [case.fault for case in cases]}


def code_state() -> str:
    """A digest of the package's sources: defects, lab and batteries."""
    root = Path(windtunnel.__file__).parent
    digest = sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class RunLog:
    """Owns the file of one self-test, open and locked until `close`; `done` has the runs that were in it."""

    def __init__(self, file: TextIO, done: Mapping[Turn, Run]) -> None:
        self._file = file
        self.done = done

    @classmethod
    def begin(cls, path: Path, head: Mapping[str, Any]) -> Self:
        """A new file. Raises LogError for one that is there already."""
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise LogError(
                f"{path} holds the runs of a self-test already: go on with --resume, or name another folder"
            ) from None
        with _closed_unless_kept(file):
            _lock(file, path)
            _write(file, head)
        return cls(file, {})

    @classmethod
    def go_on(cls, path: Path, head: Mapping[str, Any], cases: Sequence[Case]) -> Self:
        """A file that was begun. Raises LogError where its head differs, a line is none of its own, or another has it open."""
        try:
            file = path.open("r+", encoding="utf-8", newline="")
        except OSError as error:
            raise LogError(f"--resume: {path}: {error.strerror}") from None
        with _closed_unless_kept(file):
            _lock(file, path)
            done = _done(file, path, head, cases)
        return cls(file, done)

    def add(self, turn: Turn, run: Run) -> None:
        line = {
            "defect": turn.case.fault,
            "planted": turn.planted,
            "seed": turn.seed,
            "seconds": round(run.seconds, 3),
            "unusable": run.unusable,
            "seen": [{**asdict(one.finding), "storm": one.storm, "seconds": round(one.seconds, 3)} for one in run.seen],
        }
        _write(self._file, line)

    def close(self) -> None:
        """Others may go on with the file."""
        self._file.close()


@contextmanager
def _closed_unless_kept(file: TextIO) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


def _lock(file: TextIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LogError(f"another self-test is at work in {path.parent}: wait for its end, or name another folder") from None
    except OSError as error:
        if path.stat().st_size == 0:
            path.unlink()
        where = f"{path.parent} cannot be locked ({error.strerror})"
        raise LogError(f"{where}: name a folder on another file system") from None


def _write(file: TextIO, line: Mapping[str, Any]) -> None:
    """At once: what has ended is in the file, however this process ends."""
    file.write(json.dumps(line, default=lambda one: one.value) + "\n")
    file.flush()


def _done(file: TextIO, path: Path, head: Mapping[str, Any], cases: Sequence[Case]) -> dict[Turn, Run]:
    """The file's runs; what comes next is written after the last whole line."""
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise LogError(f"--resume: {path} is damaged: {error}") from None
    whole = text[: text.rfind("\n") + 1]
    first, *lines = whole.removesuffix("\n").split("\n")
    _check_head(path, first, head)
    try:
        done = dict(_read(lines, {case.fault: case for case in cases}))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LogError(f"{path}: a line is not one of a self-test's runs: {error!r}") from None
    file.seek(0)
    file.truncate(len(whole.encode()))
    file.seek(0, os.SEEK_END)
    return done


def _check_head(path: Path, line: str, head: Mapping[str, Any]) -> None:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LogError(f"{path}: its first line is not the head of a self-test")
    for key, value in head.items():
        if found.get(key) != value:
            raise LogError(
                f"--resume: {path} was begun with another {key} ({_shown(found.get(key))}, here {_shown(value)}):"
                " its runs are not of this self-test; begin another one"
            )


def _shown(value: Any) -> str:
    return str(value) if len(str(value)) <= 20 else f"{str(value)[:16]}…"


def _read(lines: Iterable[str], cases: Mapping[str, Case]) -> Iterable[tuple[Turn, Run]]:
    for line in lines:
        one = json.loads(line)
        case, planted, seed = cases[one["defect"]], bool(one["planted"]), int(one["seed"])
        seen = tuple(_seen(found) for found in one["seen"])
        yield Turn(case, planted, seed), Run(case if planted else None, seed, seen, one["seconds"], one["unusable"])


def _seen(told: dict[str, Any]) -> Seen:
    storm, seconds = told.pop("storm"), told.pop("seconds")
    told |= {"severity": Severity(told["severity"]), "evidence": tuple(told["evidence"])}
    return Seen(Finding(**told), storm, seconds)
