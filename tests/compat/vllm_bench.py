"""`vllm bench serve`, vLLM's own benchmark client (clients reference §6)."""

import json
from itertools import chain
from pathlib import Path

from tests.compat.benchmarks import OUTPUT_TOKENS, TOLD_OF, Benchmark, Report
from tests.compat.modes import Mode, Peer

_WORDS = (
    "bench serve --base-url {{url0}} --model wt-model --tokenizer {{tokenizer}} --backend {backend} --endpoint {path} "
    f"--dataset-name random --random-input-len 50 --random-output-len {OUTPUT_TOKENS} --ignore-eos --num-prompts 6 "
    "--max-concurrency 2 --save-result --save-detailed --result-dir {{folder}} --result-filename report.json"
)


def _mode(name: str, engine: str, backend: str, path: str) -> Mode:
    words = _WORDS.format(backend=backend, path=path)
    return Mode(name, engine, words, ("worker",), flags=TOLD_OF[engine], environment={"HF_HUB_OFFLINE": "1"})


def read(folder: Path) -> Report:
    told = json.loads((folder / "report.json").read_text())
    return Report(
        [1e3 * first for first in told["ttfts"]],
        [1e3 * gap for gap in chain.from_iterable(told["itls"])],
        told["input_lens"],
        told["output_lens"],
    )


PEER = Peer(
    "vllm-bench",
    "vllm",
    "vllm",
    (
        _mode("vLLM, chat", "vllm", "openai-chat", "/v1/chat/completions"),
        _mode("vLLM, completions", "vllm", "openai", "/v1/completions"),
        _mode("SGLang, chat", "sglang", "openai-chat", "/v1/chat/completions"),
    ),
    trial=Benchmark(read),
)
