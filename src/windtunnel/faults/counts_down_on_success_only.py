"""Fault `counts-down-on-success-only`: see `ghosts`."""

from windtunnel.faults.ghosts import GHOSTS, GhostFault

FAULT = GhostFault("counts-down-on-success-only", GHOSTS["counts-down-on-success-only"])
