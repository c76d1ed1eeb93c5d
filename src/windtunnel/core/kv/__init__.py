"""KV memory: blocks, their hashes and the prefix cache."""
