"""What faults of an API family share: another `plan`, or another stream encoder."""

from collections.abc import Callable
from typing import Any

from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams


class OtherEncoder(Proxy):
    """A family whose streams are written by `wrap(encoder, family name)`."""

    def __init__(self, inner: Any, wrap: Callable[[Any, str], Any]) -> None:
        super().__init__(inner)
        self._wrap = wrap

    def encoder(self, generation: Any) -> Any:
        return self._wrap(self._inner.encoder(generation), self._inner.name)


def attach_encoder(seams: Seams, wrap: Callable[[Any, str], Any]) -> Seams:
    return seams.around(family=lambda family: OtherEncoder(family, wrap))
