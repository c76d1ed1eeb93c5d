"""Settings of the whole suite: property tests have no wall-clock limit, and the same examples in every run."""

from hypothesis import settings

settings.register_profile("windtunnel", deadline=None, derandomize=True)
settings.load_profile("windtunnel")
