"""The API families of an SGLang server (SGLang reference §7)."""

from collections.abc import Sequence

from windtunnel.wire.family import Family


def families() -> Sequence[Family]:
    """The families that run requests in the engine, one module each."""
    from windtunnel.wire.sglang import chat, completions, messages, native, responses

    return (native, completions, chat, messages, responses)
