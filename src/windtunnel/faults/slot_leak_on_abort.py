"""Fault `slot-leak-on-abort`: see `ghosts`."""

from windtunnel.faults.ghosts import GHOSTS, GhostFault

FAULT = GhostFault("slot-leak-on-abort", GHOSTS["slot-leak-on-abort"])
