"""Text that matches a regex, a choice or a small grammar."""

from windtunnel.wire.synth.errors import SynthesisError


def matching_text(kind: str, pattern: str, seed: int) -> str:
    raise SynthesisError(f"{kind} is not supported")
