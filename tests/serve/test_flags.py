"""Flags, environment and configuration files: what is known, what is ignored aloud, and what is refused."""

import os
import re
from pathlib import Path

import pytest
from tests.serve.golden import split
from tests.serve.live import RawClient, live, request_bytes
from tests.serve.test_operations import BODY

from windtunnel.cli.serve import environment_flags
from windtunnel.serve.config import UsageError
from windtunnel.serve.flags import live_changes, parse_args
from windtunnel.serve.foreign_flags import FOREIGN_FLAGS
from windtunnel.serve.vllm_flags import FLAGS

REFERENCE = Path(os.environ.get("WINDTUNNEL_REFERENCE", Path(__file__).parents[3] / "shared/reference"))
SIM_VALUES = {
    "zmq-endpoint": "tcp://127.0.0.1:5557",
    "kv-events-replay-endpoint": "tcp://127.0.0.1:5558",
    "lora-modules": "a=/a",
    "served-model-name": "x",
    "mode": "random",
    "ssl-certfile": None,
    "ssl-keyfile": None,
    "time-to-first-token": "10ms",
    "time-to-first-token-std-dev": "1ms",
    "inter-token-latency": "10ms",
    "inter-token-latency-std-dev": "1ms",
    "prefill-overhead": "10ms",
    "prefill-time-per-token": "1ms",
    "startup-duration": "1s",
    "failure-types": "rate_limit",
    "failure-injection-rate": "10",
    "block-size": "16",
    "kv-cache-size": "4096",
    "seed": "1",
    "port": "8000",
    "max-num-seqs": "5",
    "model": "m",
    "max-model-len": "1024",
    "max-loras": "2",
    "hash-seed": "0",
    "max-waiting-queue-length": "10",
    "max-request-body-size-mb": "4",
}


def sim_flags() -> list[str]:
    """Every flag that the reference of llm-d-inference-sim names, with its `-std-dev` and `no-` twins written out."""
    text = (REFERENCE / "llm-d-inference-sim.md").read_text().split("### 1.2 Every flag")[1].split("### 1.3")[0]
    names: list[str] = []
    for row in text.splitlines():
        for name in re.findall(r"`([a-z\-/…]+)`", row.split("|")[1]) if row.startswith("| `") else ():
            if name == "-std-dev":
                names.append(names[-1] + name)
            elif name.startswith("min-/max-"):
                names += [name.replace("min-/max-", "min-"), name.replace("min-/max-", "max-")]
            elif "…" not in name and name != "no-":
                names.append(name)
    return names


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference texts: WINDTUNNEL_REFERENCE")
def test_every_flag_of_llm_d_inference_sim_is_taken_or_ignored_aloud() -> None:
    names = [name for name in sim_flags() if name != "config"]
    assert len(names) > 70
    for name in names:
        value = SIM_VALUES.get(name, "1")
        if value is None:
            continue
        parsed = parse_args(["m", f"--{name}", value] if name != "model" else ["--model", "m"])
        assert bool(parsed.warnings) is (name in FOREIGN_FLAGS and name not in SIM_VALUES), name


@pytest.mark.parametrize("name", sorted(FOREIGN_FLAGS))
def test_foreign_flags_give_one_warning_each(name: str) -> None:
    known = {alias for flag in FLAGS for alias in (flag.name, *flag.aliases)}
    if name in known:
        pytest.skip("served for real")
    assert len(parse_args(["m", f"--{name}", "1"]).warnings) == 1
    assert len(parse_args(["m", f"--{name}"]).warnings) == 1


def test_short_dotted_and_negated_flags_of_vllm() -> None:
    parsed = parse_args(
        ["m", "-tp", "2", "--compilation-config.level", "3", "--no-enforce-eager", "--max-num-seqs=7", "--max-logprobs", "-1"]
    )
    assert [warning.split()[0] for warning in parsed.warnings] == [
        "--compilation-config.level",
        "--no-enforce-eager",
    ]
    assert (parsed.config.scheduler.max_num_seqs, parsed.config.max_logprobs) == (7, -1)
    assert parsed.config.pacing.tensor_parallel == 2


def test_vllm_counts_some_durations_in_seconds() -> None:
    config = parse_args(
        ["m", "--shutdown-timeout", "30", "--sse-keep-alive-interval", "0.5", "--timeout-keep-alive", "2s"]
    ).config
    assert (config.shutdown_timeout_ns, config.sse_keep_alive_interval_ns, config.timeout_keep_alive_ns) == (
        30 * 10**9,
        5 * 10**8,
        2 * 10**9,
    )
    with pytest.raises(UsageError, match="--shutdown-timeout"):
        parse_args(["m", "--shutdown-timeout", "soon"])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["m", "--max-nun-seqs", "1"], "did you mean --max-num-seqs"),
        (["m", "--failure-types", "nope"], "'nope' is not one of rate_limit"),
        (["m", "--failure-injection-rate", "101"], "out of range"),
        (["m", "--shutdown-outcome", "nicely"], "error, clean, hang"),
        (["m", "--port", "http"], "port: 'http' is not a whole number"),
        (["m", "--max-num-seqs", "9" * 5000], "is not a whole number"),
        (["m", "--watermark", "much"], "watermark: 'much' is not a number"),
        (["m", "--watermark", "nan"], "'nan' is not a number"),
        (["m", "--natural-length", "5"], "'5' is not a range: write LOW:HIGH"),
        (["m", "--natural-length", "1:1e9"], "'1e9' is not a whole number"),
        (["m", "--itl", "999999999h"], "itl: 999999999h is out of range: it must be at most 1000000000s"),
        (["m", "--shutdown-timeout", "999999999h"], "out of range"),
        (["m", "--kv-events-config", "[" * 100_000], "--kv-events-config: is nested too deeply"),
        (["m", "--lora-modules", '{"a":' * 100_000], "--lora-modules: is nested too deeply"),
        (["m", "--config"], "--config takes one file"),
        (["m", "--config", "/nowhere.toml"], "--config: "),
    ],
)
def test_bad_flags_name_the_flag_and_the_right_form(args: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse_args(args)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("itl", "999999999h"),
        ("itl", 20),
        ("ttft_std", "1" * 400 + "s"),
        ("time_scale", 1e999),
        ("natural_length", [1, 10**30]),
        ("natural_length", {"low": 1}),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", 1 << 62 | 1),
        ("max_num_seqs", None),
    ],
)
def test_a_value_that_no_server_could_keep_changes_nothing(key: str, value: object) -> None:
    config = parse_args(["m"]).config
    with pytest.raises(UsageError, match=f"^{key}: "):
        live_changes(config, {"ttft": "1s", key: value})


TOML = """
model = "from-file"
served-model-name = ["a", "b"]
max_num_seqs = 9
time-to-first-token = "250ms"
dtype = "auto"
enable-lora = true
"""
YAML = (
    "model: from-file\nserved-model-name: [a, b]\nmax_num_seqs: 9\ntime-to-first-token: 250ms\ndtype: auto\nenable-lora: true\n"
)


@pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML)])
def test_a_configuration_file_and_the_command_line_over_it(tmp_path: Path, name: str, text: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    file = tmp_path / name
    file.write_text(text)
    parsed = parse_args(["--config", str(file), "--ttft", "1s"])
    config = parsed.config
    assert (config.model, config.served_model_names, config.scheduler.max_num_seqs, config.enable_lora) == (
        "from-file",
        ("a", "b"),
        9,
        True,
    )
    assert config.pacing.ttft_ns == 10**9
    assert len(parsed.warnings) == 1
    assert parse_args(["cli-model", f"--config={file}"]).config.model == "cli-model"


@pytest.mark.parametrize("text", ["max-nun-seqs = 1\n", "max-num-seqs = -1\n", "model = \n", '= "x"\n'])
def test_a_bad_configuration_file_is_a_usage_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        parse_args(["m", "--config", str(file)])


@pytest.mark.parametrize(("name", "start"), [("c.toml", "a = "), ("c.yaml", "a: ")])
def test_a_configuration_file_of_brackets_is_named(tmp_path: Path, name: str, start: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    file = tmp_path / name
    file.write_text(start + "[" * 5000)
    with pytest.raises(UsageError, match=rf"--config: .*{name} is nested too deeply"):
        parse_args(["m", "--config", str(file)])


def test_two_names_of_one_setting_are_told() -> None:
    parsed = parse_args(["m", "--prefill-overhead", "1s", "--time-to-first-token", "2s"])
    assert parsed.config.pacing.ttft_ns == 2 * 10**9
    assert parsed.warnings == ("--prefill-overhead and --time-to-first-token set the same thing: the last one holds",)


def test_the_environment_of_both_real_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_API_KEY",
        "SIM_MODEL",
        "PYTHONHASHSEED",
        "POD_NAME",
        "POD_NAMESPACE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("SIM_MODEL", "env-model"),
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("VLLM_API_KEY", "-k"),
        ("PYTHONHASHSEED", "0"),
    ):
        monkeypatch.setenv(name, value)
    config = parse_args(environment_flags([])).config
    assert (config.model, config.dev_mode, config.api_keys, config.hash_seed) == ("env-model", True, ("-k",), "0")
    args = ["mine", "--api-key", "a", "--hash-seed=7"]
    config = parse_args([*args, *environment_flags(args)]).config
    assert (config.model, config.api_keys, config.hash_seed) == ("mine", ("a",), "7")


async def test_pod_headers_on_generating_routes_only() -> None:
    async with live(pod_name="pod-1", pod_namespace="space") as server:
        for request, wanted in (
            (request_bytes("/v1/completions", BODY, extra="Connection: close\r\n"), True),
            (b"GET /health HTTP/1.0\r\n\r\n", False),
        ):
            client = await RawClient.connect(server.port)
            client.send(request)
            headers = dict(split(await client.read_all())[1])
            assert (headers.get("x-inference-pod") == "pod-1") is wanted
            assert (headers.get("x-inference-namespace") == "space") is wanted
            assert ("x-inference-port" in headers) is wanted


async def test_admin_config_takes_the_names_of_llm_d_inference_sim() -> None:
    async with live() as server:
        changed = {
            "time-to-first-token": "3ms",
            "inter-token-latency": "4ms",
            "failure-injection-rate": 0,
            "failure-types": ["rate_limit"],
        }
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/admin/config", changed, extra="Connection: close\r\n"))
        assert split(await client.read_all())[0] == 200
        config = server.server.config
        assert (config.pacing.ttft_ns, config.pacing.itl_ns, config.failures.types) == (3_000_000, 4_000_000, ("rate_limit",))
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/admin/config", {"ttft": "9s", "block-size": 8}, extra="Connection: close\r\n"))
        assert split(await client.read_all())[0] == 400
        assert server.server.config.pacing.ttft_ns == 3_000_000
