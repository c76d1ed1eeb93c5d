"""What an SGLang server adds to what a family knows about its server."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from windtunnel.wire.env import ServerEnv


@dataclass(frozen=True, slots=True)
class SglangEnv(ServerEnv):
    """`clock_s` gives Unix seconds with a fraction, for `e2e_latency`."""

    enable_cache_report: bool = False
    """`prompt_tokens_details.cached_tokens` in `usage` (SGLang reference §7.4)."""
    incremental_output: bool = False
    """`--incremental-streaming-output`: native events carry what is new and not everything so far."""
    weight_version: str = "default"
    clock_s: Callable[[], float] = time.time


def lenient(env: SglangEnv) -> SglangEnv:
    """The same server for the families that are planned by vLLM's rules: SGLang takes tools without a parser's flag, too."""
    return replace(env, enable_auto_tool_choice=True, tool_call_parser=env.tool_call_parser or "none", stored=None)
