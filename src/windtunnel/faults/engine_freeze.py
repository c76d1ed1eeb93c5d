"""Fault `engine-freeze`: see `engine_after`."""

from windtunnel.faults.engine_after import EngineAfter, freeze

FAULT = EngineAfter("engine-freeze", freeze, 20)
