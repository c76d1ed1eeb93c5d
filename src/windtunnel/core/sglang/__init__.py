"""The SGLang flavour of the engine."""

from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine

__all__ = ["SglangEngine", "SglangEngineConfig"]
