"""The two investigations of the design, as models."""
