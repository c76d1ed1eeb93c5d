"""Records the files of tests/data/calibrate anew: real load tools against a server that was told its times.

`python -m tests.sim.calibrate.record` needs `make clients`, and a machine that does nothing else: above a load average of
1.5 it refuses. It ends with the line that the folder's README wants. `vllm`, which no environment of ours has, is left out
where it is absent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import server
from tests.compat import peers

from windtunnel.wire.builtin_files import tokenizer_files

DATA = Path(__file__).parents[2] / "data" / "calibrate"
CLIENTS = (1, 4)
LOAD_MOST = 1.5
RUN_S = 300
SERVER = ("--ttft", "40ms", "--itl", "8ms", "--prefill-token-time", "0.05ms", "--enable-prompt-tokens-details")

_AIPERF_METRICS = frozenset(
    "request_latency time_to_first_token output_sequence_length output_token_count inter_chunk_latency usage_prompt_tokens "
    "input_sequence_length usage_prompt_cache_read_tokens usage_completion_tokens usage_total_tokens "
    "time_to_first_output_token time_to_second_token decode_duration inter_token_latency".split()
)
_GUIDELLM: Mapping[str, frozenset[str]] = {
    "document": frozenset({"metadata", "config", "benchmarks", "conclusions"}),
    "metadata": frozenset({"version", "guidellm_version", "python_version"}),
    "benchmark": frozenset("type_ config requests start_time end_time duration warmup_duration cooldown_duration".split()),
    "config": frozenset({"strategy", "constraints"}),
    "requests": frozenset({"successful", "errored", "incomplete", "total"}),
    "request": frozenset(
        "type_ request_id response_id reasoning_output tool_calls response_metrics request_start_time request_end_time "
        "request_latency request_dispatch_delay turn_predecessor_delay turn_scheduling_delay request_scheduled_latency "
        "prompt_tokens cached_tokens output_tokens total_tokens time_to_first_token_ms time_to_last_round_trip_ms "
        "avg_round_trip_time_ms time_per_output_token_ms inter_token_latency_ms tokens_per_second output_tokens_per_second "
        "time_to_first_output_token_ms iter_tokens_per_iteration output_tokens_per_iteration".split()
    ),
}

_VLLM_BENCH = frozenset(
    "date backend endpoint_type num_prompts max_concurrency duration completed failed input_lens output_lens ttfts itls "
    "latencies start_times errors".split()
)


def kept_of_vllm_bench(text: str) -> str:
    """Without answers, the tokenizer's path, and figures that nobody reads."""
    return _compact({name: value for name, value in json.loads(text).items() if name in _VLLM_BENCH}) + "\n"


def kept_of_aiperf(text: str) -> str:
    """Without the figures that nobody reads."""
    lines = []
    for line in text.splitlines():
        told = json.loads(line)
        metrics = {name: value for name, value in told["metrics"].items() if name in _AIPERF_METRICS}
        lines.append(_compact({"metadata": told["metadata"], "metrics": metrics}))
    return "\n".join(lines) + "\n"


def kept_of_guidellm(text: str) -> str:
    """Without prompts, answers, and settings, which name local paths."""
    told = _only("document", json.loads(text)) | {"config": {}}
    told["metadata"] = _only("metadata", told["metadata"])
    told["benchmarks"] = [_kept_of_benchmark(one) for one in told["benchmarks"]]
    return _compact(told) + "\n"


def _kept_of_benchmark(told: Mapping[str, Any]) -> dict[str, Any]:
    kept = _only("benchmark", told) | {part: _only(part, told[part]) for part in ("config", "requests")}
    kept["requests"] = {
        ended: [_only("request", one) for one in requests] if requests else requests
        for ended, requests in kept["requests"].items()
    }
    return kept


def _only(part: str, told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name in _GUIDELLM[part]}


def _compact(told: Any) -> str:
    return json.dumps(told, separators=(",", ":"))


@dataclass(frozen=True)
class Tool:
    """`words` with `{url}`, `{tokenizer}`, `{folder}` and `{clients}`; `export` is what it writes to the folder.

    Without an `environment` of ours that has it, it is left out where it is absent.
    """

    words: str
    export: str
    file: str
    kept: Callable[[str], str]
    environment: bool = True


TOOLS = {
    "aiperf": Tool(
        "profile --model bench-model --tokenizer {tokenizer} --url {url} --endpoint-type chat --streaming "
        "--concurrency {clients} --request-count 16 --synthetic-input-tokens-mean 400 --synthetic-input-tokens-stddev 250 "
        "--output-tokens-mean 12 --extra-inputs ignore_eos:true --shared-system-prompt-length 64 --ui-type simple "
        "--artifact-dir {folder}",
        "profile_export.jsonl",
        "aiperf-c{clients}.jsonl",
        kept_of_aiperf,
    ),
    "guidellm": Tool(
        "run --backend kind=openai_http,target={url},model=bench-model --profile {profile} "
        "--constraint kind=max_requests,count=16 --tokenizer kind=huggingface_auto,model={tokenizer} "
        "--output kind=json,path={folder}/out.json --disable-console-interactive --data kind=synthetic_text,"
        "prompt_tokens=300,prompt_tokens_stdev=200,prompt_tokens_min=20,prompt_tokens_max=900,output_tokens=12",
        "out.json",
        "guidellm-c{clients}.json",
        kept_of_guidellm,
    ),
    "vllm": Tool(
        "bench serve --base-url {url} --model bench-model --tokenizer {tokenizer} --backend openai-chat "
        "--endpoint /v1/chat/completions --dataset-name random --random-input-len 300 --random-output-len 12 "
        '--random-range-ratio {{"input":0.9,"output":0.0}} --random-prefix-len 64 --ignore-eos --num-prompts 16 '
        "--max-concurrency {clients} --save-result --save-detailed --result-dir {folder} --result-filename out.json",
        "out.json",
        "vllm-bench-c{clients}.json",
        kept_of_vllm_bench,
        environment=False,
    ),
}


def record(name: str, out: Path) -> None:
    """One server for all of a tool's runs: GuideLLM's second one finds the prompts of its first in the cache."""
    with server(*SERVER) as (port, _):
        for clients in CLIENTS:
            _record(name, clients, port, out)


def _record(name: str, clients: int, port: int, out: Path) -> None:
    """Raises CalledProcessError where the tool fails, TimeoutExpired where it has no end."""
    tool, program = TOOLS[name], peers.find(name)
    with tempfile.TemporaryDirectory() as at:
        folder, tokenizer = Path(at), Path(at) / "tokenizer"
        tokenizer.mkdir()
        for file, data in tokenizer_files().items():
            (tokenizer / file).write_bytes(data)
        profile = "kind=synchronous" if clients == 1 else f"kind=concurrent,streams={clients}"
        places = {"tokenizer": tokenizer, "folder": folder, "clients": clients, "profile": profile}
        words = tool.words.format(url=f"http://127.0.0.1:{port}", **places).split()
        environment = os.environ | ({} if name == "aiperf" else {"HF_HUB_OFFLINE": "1"})
        subprocess.run([str(program), *words], check=True, timeout=RUN_S, stdout=subprocess.DEVNULL, env=environment)
        (out / tool.file.format(clients=clients)).write_text(tool.kept((folder / tool.export).read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.calibrate.record", description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA, help="another folder than that of the tests")
    parser.add_argument("--busy", action="store_true", help="record whatever else the machine does")
    options = parser.parse_args(arguments)
    absent = [name for name, tool in TOOLS.items() if tool.environment and peers.find(name) is None]
    load = os.getloadavg()[0]
    if absent or (load > LOAD_MOST and not options.busy):
        said = [f"{name}: not installed: {peers.hint(name)}" for name in absent]
        print("\n".join(said) or f"the load average is {load:.1f}: wait for {LOAD_MOST} or less", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    programs = {name: found for name in TOOLS if (found := peers.find(name))}
    for name in programs:
        record(name, options.out)
    told = [f"{name} {peers.version(name, found)}" for name, found in programs.items()]
    print(f"Written by {' and '.join(told)}, {time.strftime('%Y-%m-%d')}, load average {load:.2f} before the first")
    return 0


if __name__ == "__main__":
    sys.exit(main())
