"""A small router: prefill/decode pairs as SGLang's `mini_lb` or llm-d's sidecar makes them, or plain workers in turns."""
