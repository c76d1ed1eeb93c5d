"""Fault `notified-by-own-id`: see `kv_switch` and `KvTransferConfig.notify_own_id`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("notified-by-own-id", notify_own_id=True)
