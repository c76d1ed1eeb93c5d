"""Exit codes of every sub-command (DESIGN: the surface)."""

OK = 0
"""As predicted, clean."""
FINDING = 1
"""A finding, or a prediction refuted."""
USAGE = 2
"""Usage or environment."""
INCONCLUSIVE = 3
