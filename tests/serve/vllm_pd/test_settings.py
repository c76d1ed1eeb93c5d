"""`--kv-transfer-config`, its dotted members, the environment, and what is refused."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.cli.serve import environment_flags
from windtunnel.core.units import S
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.flags import parse_args
from windtunnel.serve.vllm_pd.settings import core_config

MOONCAKE = '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}'
NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def _parsed(*args: str) -> ServeConfig:
    return parse_args(["--model", "m", *args]).config


def _core(config: ServeConfig, rank: int | None = None, time_scale: float = 1.0) -> Any:
    return core_config(
        config.kv_transfer,
        rank=rank,
        host="127.0.0.1",
        port=7000,
        model=config.model,
        version=config.vllm_version,
        block_size=16,
        kv_bytes_per_token=1000,
        time_scale=time_scale,
        change=lambda config: config,
    )


def test_without_the_flag_there_is_no_connector() -> None:
    assert not _parsed().kv_transfer.on
    assert not _parsed("--nixl-side-channel-port", "0").kv_transfer.on


def test_json_and_single_members_go_together_and_the_single_ones_win() -> None:
    told = _parsed("--kv-transfer-config", NIXL, "--kv-transfer-config.kv_role", "kv_producer")
    assert told.kv_transfer.members == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    alone = _parsed("--kv-transfer-config.kv_connector=NixlPushConnector", "--kv-transfer-config.kv_role=kv_consumer")
    assert _core(alone).pushes
    assert json.loads(json.dumps(told.kv_transfer.members)) == told.kv_transfer.members


def test_what_the_engine_is_told() -> None:
    extra = json.dumps({**json.loads(NIXL), "engine_id": "e", "kv_connector_extra_config": {"kv_lease_duration": 60}})
    config = _parsed("--kv-transfer-config", extra, "--nixl-side-channel-host", "10.0.0.1")
    core = _core(config, rank=1, time_scale=10)
    assert (core.engine_id, core.side_channel_host, core.side_channel_port) == ("e_dp1", "10.0.0.1", 7000)
    assert (core.hold_ns, core.beat_ns, core.extension_ns) == (6 * S, S, 4 * S)


def test_an_engine_without_a_name_gets_another_one_each_time() -> None:
    config = _parsed("--kv-transfer-config", NIXL)
    assert _core(config).engine_id != _core(config).engine_id


def test_the_older_timeout_is_a_switch_and_its_variable_alone_is_not_read() -> None:
    """vLLM 0.33 does not read VLLM_NIXL_ABORT_REQUEST_TIMEOUT (reference §7.2)."""
    assert _core(_parsed("--kv-transfer-config", NIXL, "--nixl-abort-request-timeout", "120")).hold_ns == 30 * S
    older = _core(_parsed("--kv-transfer-config", NIXL, "--nixl-hold", "timeout"))
    assert (older.hold_ns, older.beat_ns) == (480 * S, None)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOST", "10.0.0.2"), ("PORT", "5700")):
        monkeypatch.setenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", value)
    flags = environment_flags(["--model", "m"])
    settings = _parsed(*flags).kv_transfer
    assert (settings.side_channel_host, settings.side_channel_port) == ("10.0.0.2", 5700)
    assert "--nixl-side-channel-port=5700" not in environment_flags(["--nixl-side-channel-port", "1"])


def test_a_bad_value_of_the_environment_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "abc")
    told = CliRunner().invoke(app, ["serve", "--model", "m"])
    assert told.exit_code == 2
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT: " in told.output and "--nixl" not in told.output
    told = CliRunner().invoke(app, ["serve", "--model", "m", "--nixl-side-channel-port", "xyz"])
    assert "--nixl-side-channel-port: " in told.output and "VLLM_" not in told.output


def test_another_release_has_another_hash() -> None:
    config = _parsed("--kv-transfer-config", NIXL)
    older = _parsed("--kv-transfer-config", NIXL, "--vllm-version", "0.32.0")
    assert _core(config).compatibility_hash == _core(config).compatibility_hash != _core(older).compatibility_hash


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--kv-transfer-config", "{"], "not JSON"),
        (["--kv-transfer-config", "[]"], "object"),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "kv_role"),
        (["--kv-transfer-config", '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}'], "not modelled"),
        (["--kv-transfer-config", MOONCAKE, "--kv-transfer-backend", "nixl"], "no real bytes"),
        (
            ["--kv-transfer-config", MOONCAKE[:-1] + ', "kv_connector_extra_config": {"kv_lease_duration": 3}}'],
            "not a field of",
        ),
        (["--kv-transfer-config", NIXL[:-1] + ', "kv_connector_extra_config": {"num_workers": 3}}'], "not a field of"),
        (["--kv-transfer-config", MOONCAKE[:-1] + ', "kv_connector_extra_config": {"num_workers": 0}}'], "num_workers is 0"),
        (
            ["--kv-transfer-config", MOONCAKE[:-1] + ', "kv_connector_extra_config": {"bootstrap_server_address": "host"}}'],
            "bootstrap_server_address is 'host': must be a host and a port",
        ),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "boss"}'], "kv_role is 'boss'"),
        (["--kv-transfer-config", NIXL[:-1] + ', "what": 1}'], "what is not a field"),
        (["--kv-transfer-config.kv_role", "kv_both"], "kv_connector is missing"),
        (["--kv-transfer-config", NIXL, "--kv-offloading-blocks", "8"], "MultiConnector"),
        (["--nixl-side-channel-port", "65535", "--data-parallel-size", "2"], "--nixl-side-channel-port"),
        (["--transfer-fates", "explode=1"], "KIND=SHARE"),
        (["--transfer-fates", "fail=0.9,stall=0.2"], "more than 1"),
        (["--nixl-hold", "for-ever"], "lease, timeout"),
    ],
)
def test_bad_settings_are_named(args: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        _parsed(*args)


def test_what_a_mooncake_engine_is_told() -> None:
    told = json.dumps({**json.loads(MOONCAKE), "kv_connector_extra_config": {"num_workers": 3, "mooncake_protocol": "tcp"}})
    config = _parsed("--kv-transfer-config", told, "--mooncake-abort-request-timeout", "60", "--nixl-hold", "lease")
    core = _core(config, time_scale=10)
    assert core.mooncake and (core.hold_ns, core.pull_margin_ns, core.num_workers) == (6 * S, 6 * S, 3)
    assert (core.side_channel_host, core.side_channel_port) == ("127.0.0.1", 7000)
    assert config.kv_transfer.parsed("-").ignored == ("mooncake_protocol",)
    assert _core(_parsed("--kv-transfer-config", MOONCAKE)).hold_ns == 480 * S


def test_the_environment_of_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BOOTSTRAP_PORT", "9000"), ("ABORT_REQUEST_TIMEOUT", "7"), ("CONNECTOR_TIMEOUT", "2.5")):
        monkeypatch.setenv(f"VLLM_MOONCAKE_{name}", value)
    told = _parsed(*environment_flags([])).kv_transfer
    assert told.mooncake_bootstrap_port == 9000
    assert (told.mooncake_abort_timeout_ns, told.mooncake_connector_timeout_ns) == (7 * S, 2_500_000_000)
