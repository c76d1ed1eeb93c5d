"""What SGLang's prefill/decode workers and vLLM's engines with a KV connector have in common: the ways between processes."""
