"""Fault `engine-death`: see `engine_after`."""

from windtunnel.faults.engine_after import EngineAfter, kill

FAULT = EngineAfter("engine-death", kill, 20)
