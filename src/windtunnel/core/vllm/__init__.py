"""The vLLM flavour of the engine."""

from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmEngineConfig"]
