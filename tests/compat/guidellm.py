"""GuideLLM (clients reference §6)."""

import json
from pathlib import Path

from tests.compat.benchmarks import OUTPUT_TOKENS, TOLD_OF, Benchmark, Report
from tests.compat.modes import Mode, Peer

_WORDS = (
    "run --backend kind=openai_http,target={{url0}},model=wt-model,request_format={path} "
    "--profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6 "
    "--tokenizer kind=huggingface_auto,model={{tokenizer}} "
    f"--data kind=synthetic_text,prompt_tokens=50,output_tokens={OUTPUT_TOKENS} "
    "--output kind=json,path={{folder}}/report.json --disable-console-interactive"
)


def _mode(name: str, engine: str, path: str) -> Mode:
    words = _WORDS.format(path=path)
    return Mode(name, engine, words, ("worker",), flags=TOLD_OF[engine], environment={"HF_HUB_OFFLINE": "1"})


def read(folder: Path) -> Report:
    (run,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    done = run["requests"]["successful"]
    return Report(
        [one["time_to_first_token_ms"] for one in done],
        [one["inter_token_latency_ms"] for one in done],
        [one["prompt_tokens"] for one in done],
        [one["output_tokens"] for one in done],
        len(run["requests"]["incomplete"] or ()),
    )


PEER = Peer(
    "guidellm",
    "guidellm",
    "guidellm",
    (
        _mode("vLLM, chat", "vllm", "/v1/chat/completions"),
        _mode("vLLM, completions", "vllm", "/v1/completions"),
        _mode("SGLang, chat", "sglang", "/v1/chat/completions"),
    ),
    trial=Benchmark(read),
)
