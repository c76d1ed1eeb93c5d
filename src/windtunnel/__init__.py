"""Windtunnel: a GPU-free test bench for LLM serving."""

__version__ = "0.1.0"
