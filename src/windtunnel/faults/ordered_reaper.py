"""Fault `ordered-reaper`: see `kv_switch` and `KvTransferConfig.ordered_reaper`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("ordered-reaper", ordered_reaper=True)
