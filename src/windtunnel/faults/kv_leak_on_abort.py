"""Fault `kv-leak-on-abort`: see `ghosts`."""

from windtunnel.faults.ghosts import GHOSTS, GhostFault

FAULT = GhostFault("kv-leak-on-abort", GHOSTS["kv-leak-on-abort"])
