"""A small router: prefill/decode pairs as `mini_lb` makes them, or round robin over plain workers."""
