"""The API families of a vLLM server."""

from collections.abc import Sequence

from windtunnel.wire.family import Family


def families(runner: str = "generate") -> Sequence[Family]:
    """The families that run requests in the engine, one module each.

    Imported here: `wire.env` needs this package's table of versions first.
    """
    from windtunnel.wire.vllm import chat, chat_batch, completions, generate, invocations, messages, responses, scoring

    return (completions, chat, chat_batch, responses, messages, generate, invocations, scoring)
