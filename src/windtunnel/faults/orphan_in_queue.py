"""Fault `orphan-in-queue`: see `ghosts`."""

from windtunnel.faults.ghosts import GHOSTS, GhostFault

FAULT = GhostFault("orphan-in-queue", GHOSTS["orphan-in-queue"])
