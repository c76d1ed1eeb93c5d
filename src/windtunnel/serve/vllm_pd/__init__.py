"""vLLM's prefill/decode disaggregation, live: the side channel, the data plane, and the flavour that joins them to an engine."""
