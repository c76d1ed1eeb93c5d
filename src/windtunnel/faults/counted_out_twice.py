"""Fault `counted-out-twice`: see `ghosts`."""

from windtunnel.faults.ghosts import GHOSTS, GhostFault

FAULT = GhostFault("counted-out-twice", GHOSTS["counted-out-twice"])
