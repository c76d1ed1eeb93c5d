"""The table of planted defects: plain data, so that listing them loads none of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    module: str
    summary: str
    seam: str
    """The seam that it attaches to (a field of `serve.seams.Seams`, or of the engine's)."""
    models: tuple[str, ...]
    """The public reports that it models."""
    finding: str
    """The finding that the lab must raise."""
    option: str = ""
    """What may follow the name after a colon (`NAME:VALUE`), with its default; empty: nothing."""


class UnknownFault(ValueError):
    """No defect of this name, or one that takes no value. The message says which there are."""


def find(text: str) -> "tuple[CatalogueEntry, str]":
    """The entry that `NAME` or `NAME:VALUE` means, and the value."""
    name, _, value = text.partition(":")
    entry = CATALOGUE.get(name)
    if entry is None:
        raise UnknownFault(f"{name!r} is not a fault; those are {', '.join(CATALOGUE)}")
    if value and not entry.option:
        raise UnknownFault(f"{name!r} takes no value")
    return entry, value


_ENTRIES = (
    CatalogueEntry(
        name="response-object-reuse",
        module="response_object_reuse",
        summary="responses come from a pool; a stream that outlives its handler reports a failed write into one of them",
        seam="wrap_app, write_failed",
        models=("cancelled-streams investigation",),
        finding="bystander_error",
    ),
    CatalogueEntry(
        name="deaf-to-disconnect",
        module="deaf_to_disconnect",
        summary="the request runs on after its client has gone",
        seam="disconnected",
        models=("vLLM #10087", "vLLM #54947"),
        finding="zombie_tokens",
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
