"""Where the real peers are: programs of environments of their own, never imported here.

`WINDTUNNEL_ROUTERS` names the folder of their programs (several, separated as in PATH); without it those of the environments
are looked into that `make routers` and `make clients` build from locks. A program of `SYSTEM` is looked for on PATH instead.
"""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLE = "WINDTUNNEL_ROUTERS"
SYSTEM = {"prometheus": "it is not on PATH; Debian's package is called so, too"}
"""Programs that no package index has."""
_ASK_S = 60
_BUILT = (".venv-routers", ".venv-litellm", ".venv-benchmarks")


def folders() -> list[Path]:
    told = os.environ.get(VARIABLE)
    return [Path(part) for part in told.split(os.pathsep)] if told else [ROOT / name / "bin" for name in _BUILT]


def hint(program: str) -> str:
    built = f"run `make routers` or `make clients`, or let {VARIABLE} name the folder of its programs"
    return SYSTEM.get(program, built)


def find(program: str) -> Path | None:
    if program in SYSTEM:
        told = shutil.which(program)
        return Path(told) if told else None
    return next((folder / program for folder in folders() if (folder / program).is_file()), None)


def program(name: str) -> str:
    """Its path. Skips the test where it is not installed."""
    found = find(name)
    if found is None:
        pytest.skip(f"no {name}: {hint(name)}")
    return str(found)


@cache
def version(package: str, found: Path) -> str:
    """As the environment of the program says it, or, of no package, the program itself."""
    if not package:
        return _said(found)
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([found.parent / "python", "-c", ask], capture_output=True, text=True, timeout=_ASK_S, check=True)
    return told.stdout.strip()


def _said(found: Path) -> str:
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=True)
    (said,) = re.findall(r"version (\S+)", told.stdout.splitlines()[0])
    return str(said)
