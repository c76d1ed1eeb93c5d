"""Whole clusters in virtual time: engines, network, clients, routing policies, workloads; all seeded."""
