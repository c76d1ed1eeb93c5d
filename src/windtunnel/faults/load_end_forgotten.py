"""Fault `load-end-forgotten`: see `kv_switch` and `KvTransferConfig.forget_on_abort`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("load-end-forgotten", forget_on_abort=True)
