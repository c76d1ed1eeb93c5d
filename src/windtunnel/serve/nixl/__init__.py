"""Real bytes between two servers of one machine, moved by NIXL over UCX.

NIXL is optional: nothing here imports it before it is asked for.
"""
