"""Fault `load-into-freed-blocks`: see `kv_switch` and `KvTransferConfig.free_on_abort`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("load-into-freed-blocks", free_on_abort=True)
