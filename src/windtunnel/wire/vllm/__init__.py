"""The API families of a vLLM server."""

from collections.abc import Sequence

from windtunnel.wire.family import Family


def families() -> Sequence[Family]:
    """The generating families, one module each. Imported here, because they need `wire.env`, which needs this package."""
    from windtunnel.wire.vllm import chat, completions, messages, responses

    return (completions, chat, responses, messages)
