"""The API families of a vLLM server."""

from collections.abc import Sequence

from windtunnel.wire.family import Family
from windtunnel.wire.vllm import chat, chat_batch, completions, invocations


def families() -> Sequence[Family]:
    """The generating families, one module each."""
    return (completions, chat, chat_batch, invocations)
