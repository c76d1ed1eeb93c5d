"""The API families of a vLLM server."""

from collections.abc import Sequence

from windtunnel.wire.family import Family


def families() -> Sequence[Family]:
    """The generating families, one module each. Imported here: `wire.env` needs this package's table of versions first."""
    from windtunnel.wire.vllm import chat, chat_batch, completions, generate, invocations

    return (completions, chat, chat_batch, generate, invocations)
