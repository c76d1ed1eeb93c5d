"""Replay of recorded vLLM cases against the simulator, and an honest count of what matches."""
