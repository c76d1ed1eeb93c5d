"""Prefill/decode disaggregation of SGLang: the two kinds of workers and what they keep for each rank."""
