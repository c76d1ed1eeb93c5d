"""The one error of this package."""


class SynthesisError(ValueError):
    """A schema or pattern that is wrong, cannot be satisfied, or is not supported. The text says which and why."""
