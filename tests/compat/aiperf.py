"""AIPerf (clients reference §6)."""

import json
from pathlib import Path

from tests.compat.benchmarks import OUTPUT_TOKENS, TOLD_OF, Benchmark, Report
from tests.compat.modes import Mode, Peer

_WORDS = (
    "profile --model wt-model --tokenizer {tokenizer} --url {url0} --streaming --concurrency 2 "
    f"--synthetic-input-tokens-mean 50 --output-tokens-mean {OUTPUT_TOKENS} --extra-inputs ignore_eos:true "
    "--random-seed 7 --ui-type simple --artifact-dir {folder}"
)
_SIX = "--request-count 6"
_HALF = "--request-count 16 --request-cancellation-rate 50 --request-cancellation-delay"


def _mode(name: str, engine: str, endpoint: str, more: str = _SIX) -> Mode:
    return Mode(name, engine, f"{_WORDS} --endpoint-type {endpoint} {more}", ("worker",), flags=TOLD_OF[engine])


def read(folder: Path) -> Report:
    """A request that was cancelled has no times."""
    lines = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    cancelled = sum(line["metadata"]["was_cancelled"] for line in lines)
    done = [line["metrics"] for line in lines if not line["metadata"]["was_cancelled"]]

    def column(name: str) -> list[float]:
        return [one[name]["value"] for one in done if name in one]

    return Report(
        column("time_to_first_token"),
        column("inter_token_latency"),
        [int(value) for value in column("input_sequence_length")],
        [int(value) for value in column("output_sequence_length")],
        cancelled,
    )


PEER = Peer(
    "aiperf",
    "aiperf",
    "aiperf",
    (
        _mode("vLLM, chat", "vllm", "chat"),
        _mode("vLLM, messages", "vllm", "messages"),
        _mode("SGLang, chat", "sglang", "chat"),
        _mode("vLLM, half of them cancelled before a token", "vllm", "chat", f"{_HALF} 0.3"),
        _mode("vLLM, half of them cancelled in the stream", "vllm", "chat", f"{_HALF} 1.4"),
        _mode("SGLang, half of them cancelled in the stream", "sglang", "chat", f"{_HALF} 1.4"),
    ),
    trial=Benchmark(read),
)
