"""Fault `refusal-tells-nobody`: see `kv_switch` and `KvTransferConfig.refusals_tell_nobody`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("refusal-tells-nobody", refusals_tell_nobody=True)
