"""vLLM's KV connector: prefill/decode disaggregation inside the engine (vLLM reference §7). Sans-IO."""
