"""SGLang's own flags: which names are taken, which are ignored aloud, which are refused."""

import pytest

from windtunnel.cli.serve import environment_flags, help_text
from windtunnel.serve.config import UsageError, as_json
from windtunnel.serve.flags import VLLM_FLAGS, parse_args, table_of
from windtunnel.serve.sglang.foreign_flags import SGLANG_FOREIGN_FLAGS

BASE = ["--engine", "sglang", "--model-path", "m"]


def test_names_and_defaults_are_sglangs() -> None:
    flags = "--served-model-name a --tp-size 2 --dp 2 --page-size 16 --chunked-prefill-size -1 --max-running-requests 8 "
    flags += "--schedule-policy lpm --disable-radix-cache --enable-cache-report --sglang-profile 0.5.15 --api-key k"
    config = parse_args([*BASE, *flags.split()]).config
    assert (config.port, config.host, config.names, config.data_parallel_size) == (30000, "127.0.0.1", ("a",), 2)
    own = config.sglang
    assert (own.tp_size, own.page_size, own.chunked_prefill_size, own.max_running_requests) == (2, 16, -1, 8)
    assert (own.schedule_policy, own.disable_radix_cache, own.enable_cache_report) == ("lpm", True, True)
    assert own.profile == "0.5.15"
    assert own.enable_metrics
    assert not parse_args([*BASE, "--no-enable-metrics"]).config.sglang.enable_metrics


def test_the_vllm_table_is_as_it_was() -> None:
    config = parse_args(["m"]).config
    assert (config.engine, config.port) == ("vllm", 8000)
    with pytest.raises(UsageError, match="--page-size is not a flag"):
        parse_args(["m", "--page-size", "4"])


def test_shared_flags_keep_their_names() -> None:
    flags = ["--itl", "20ms", "--ttft", "1s", "--time-scale", "10", "--mode", "echo", "--max-body-bytes", "1000"]
    config = parse_args([*BASE, *flags]).config
    assert (config.pacing.itl_ns, config.pacing.time_scale, config.generation.mode) == (20_000_000, 10.0, "echo")
    assert config.limits.body_bytes == 1000


@pytest.mark.parametrize("name", ["mem-fraction-static", "attention-backend", "load-format", "disable-cuda-graph"])
def test_real_flags_without_a_meaning_are_ignored_with_one_warning(name: str) -> None:
    warnings = parse_args([*BASE, f"--{name}=1"]).warnings
    assert warnings == (f"--{name} is a flag of the real server that means nothing here: ignored",)


def test_no_flag_is_both_known_and_foreign() -> None:
    assert not table_of("sglang").by_name.keys() & SGLANG_FOREIGN_FLAGS
    assert len(SGLANG_FOREIGN_FLAGS) > 250


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--page-sise", "4"], "did you mean --page-size"),
        (["--block-size", "4"], "--block-size is not a flag"),
        (["--schedule-policy", "best"], "is not one of"),
        (["--sglang-profile", "0.3.0"], "must lie between 0.4.10 and 0.5.23"),
        (["--page-size", "600", "--max-total-tokens", "1000"], "--max-total-tokens is 1000: must hold at least 2 pages"),
        (["--fault", "head-of-line-wedge"], "needs --engine vllm"),
        (["--chunked-prefill-size", "2", "--page-size", "4"], "chunked-prefill-size is 2"),
    ],
)
def test_what_cannot_be_is_refused(args: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_args([*BASE, *args])


def test_the_environment_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "2")
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "7")
    monkeypatch.setenv("VLLM_API_KEY", "not here")
    config = parse_args([*BASE, *environment_flags(BASE)]).config
    assert config.sglang.request_state_wait_ns == 2 * 10**9
    assert config.sglang.req_waiting_timeout_ns == 7 * 10**9
    assert not config.sglang.health_generation
    assert config.api_keys == ()


def test_help_and_effective_settings() -> None:
    assert "--max-running-requests *" in help_text("sglang")
    assert "--block-size" not in help_text("sglang")
    assert "--block-size" in help_text()
    told = as_json(parse_args([*BASE, "--admin-api-key", "secret"]).config)
    assert told["sglang"]["admin_api_key"] == "***"
    assert VLLM_FLAGS.default_port == 8000
