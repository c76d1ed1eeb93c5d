"""Fault `heartbeats-ignored`: see `kv_switch` and `KvTransferConfig.ignore_heartbeats`."""

from windtunnel.faults.kv_switch import KvSwitch

FAULT = KvSwitch("heartbeats-ignored", ignore_heartbeats=True)
