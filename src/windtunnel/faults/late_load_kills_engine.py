"""Fault `late-load-kills-engine`: see `kv_switch` and `KvTransferConfig.die_of_late_load`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("late-load-kills-engine", die_of_late_load=True)
