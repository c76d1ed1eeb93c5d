"""vLLM's prefill/decode disaggregation, live: side channel, data plane, and the flavour that joins them to an engine."""
