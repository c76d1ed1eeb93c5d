"""A stand-in that passes everything on, for faults that change one method of an engine, a sink, a family or an encoder."""

import itertools
from collections.abc import Callable
from typing import Any


class Proxy:
    """Behaves like `inner` in everything that a subclass does not define."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def every_second(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wraps every second one of what it is given, beginning with the second."""
    count = itertools.count()

    def wrap(inner: Any, *_about: Any) -> Any:
        return make(inner) if next(count) % 2 else inner

    return wrap
