"""Answers made from a schema: deterministic from (identity, schema), and always valid against it."""

from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.jsonvalue import json_text, json_value
from windtunnel.wire.synth.patterns import matching_text

__all__ = ["SynthesisError", "json_text", "json_value", "matching_text"]
