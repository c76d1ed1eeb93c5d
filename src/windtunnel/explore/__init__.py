"""Interleavings on purpose: describe processes, shared state and invariants, and find the schedule that breaks.

`model` is the page a user reads; `machine` executes a model as a table; `searches`, `fairness` and `shrink` look for
violations and make them short; `replay` and `timeline` show them.
"""

from windtunnel.explore.invariants import (
    ABORTED_OUTPUT_STOPS,
    ENDS_ONCE,
    NO_WRITE_TO_FREED_PAGE,
    PROGRESS,
    RELEASED_ONCE,
    TERMINAL_STICKS,
    Invariant,
)
from windtunnel.explore.model import Model, Steps, always, eventually, parameter, process

__all__ = [
    "ABORTED_OUTPUT_STOPS",
    "ENDS_ONCE",
    "NO_WRITE_TO_FREED_PAGE",
    "PROGRESS",
    "RELEASED_ONCE",
    "TERMINAL_STICKS",
    "Invariant",
    "Model",
    "Steps",
    "always",
    "eventually",
    "parameter",
    "process",
]
