"""KV transfer between prefill and decode: the status of rooms and the backends that move pages."""
