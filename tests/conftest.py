"""Settings of the whole suite: no property test has a wall-clock limit, and every run the same examples and surroundings."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("windtunnel", deadline=None, derandomize=True)
settings.load_profile("windtunnel")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

OF_A_PERSON = {"COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "RAY_ADDRESS"}
"""What a person has set for a terminal or a cluster of theirs. It would change what is said here, and a proxy who is asked."""
for name in [name for name in os.environ if name in OF_A_PERSON or name.lower().endswith("_proxy")]:
    del os.environ[name]

LONGEST_FIRST = (
    "routers/test_pages.py",
    "lab/test_planted.py",
    "lab/test_storm_command.py",
    "routers/test_up.py",
    "lab/test_protocols.py",
    "lab/test_experiment.py",
    "serve/sglang/test_pd_processes.py",
    "lab/test_planted_pairs.py",
    "serve/vllm_pd/test_processes.py",
    "routers/test_vllm_pd.py",
    "lab/test_findings.py",
    "lab/test_clients.py",
    "serve/test_process.py",
    "serve/vllm_pd/test_mooncake_processes.py",
    "lab/test_trust.py",
    "serve/vllm_pd/test_pair.py",
    "serve/test_big_prompts.py",
    "lab/test_experiment_protocols.py",
    "sim/test_agreement.py",
    "lab/test_dialects.py",
    "serve/sglang/test_transport.py",
    "lab/test_compare.py",
    "lab/test_selftest.py",
    "routers/test_prometheus.py",
    "lab/test_pytest_plugin.py",
    "serve/sglang/test_real_bytes.py",
)
"""Files with few tests that take long. A worker that begins one of them last is waited for by all others."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """What collection made stays to the end, so the collector need not go over it again and again."""
    gc.collect()
    gc.freeze()
