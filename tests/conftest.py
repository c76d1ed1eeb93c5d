"""Settings of the whole suite: property tests have no wall-clock limit, and the same examples in every run."""

import signal

from hypothesis import settings

settings.register_profile("windtunnel", deadline=None, derandomize=True)
settings.load_profile("windtunnel")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
