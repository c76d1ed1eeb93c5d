"""`--config FILE`: flag names and values in TOML or YAML, read into what the command line would have said."""

import tomllib
from pathlib import Path
from typing import Any

from windtunnel.serve.config import TOO_DEEP, UsageError

_LARGEST_BYTES = 1024 * 1024


def read_config_file(name: str) -> list[tuple[str, list[Any]]]:
    """(flag name, its values) in the order of the file. Raises UsageError."""
    try:
        raw = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"--config: {error}") from None
    if len(raw) > _LARGEST_BYTES:
        raise UsageError(f"--config: {name} is larger than {_LARGEST_BYTES} bytes")
    told = _toml(name, raw) if name.endswith(".toml") else _yaml(name, raw)
    if not isinstance(told, dict):
        raise UsageError(f"--config: {name} must hold a map of flag names to values")
    return [(str(key).replace("_", "-"), _values(value)) for key, value in told.items() if value is not None]


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _toml(name: str, raw: bytes) -> Any:
    try:
        return tomllib.loads(raw.decode())
    except RecursionError:
        raise UsageError(f"--config: {name} {TOO_DEEP}") from None
    except ValueError as error:
        raise UsageError(f"--config: {name}: {error}") from None


def _yaml(name: str, raw: bytes) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]  # PyYAML comes without types
    except ImportError:
        raise UsageError(f"--config: {name} is YAML and PyYAML is not installed: install it or write TOML") from None
    try:
        return yaml.safe_load(raw)
    except RecursionError:
        raise UsageError(f"--config: {name} {TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--config: {name}: {error}") from None
