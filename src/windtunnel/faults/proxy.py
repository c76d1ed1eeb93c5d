"""A stand-in that passes everything on, for faults that change one method of an engine, a sink, a family or an encoder."""

from typing import Any


class Proxy:
    """Behaves like `inner` in everything that a subclass does not define."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
