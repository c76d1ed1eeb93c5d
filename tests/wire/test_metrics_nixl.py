"""The series of a NIXL connector, fed by two engines."""

from tests.core.vllm.kv_rig import Pair, answer

from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.metrics import VllmMetrics


def metrics(kv_role: str | None) -> VllmMetrics:
    labels = cache_config_labels(block_size=16, num_gpu_blocks=65, max_model_len=1024)
    return VllmMetrics("m", [0], 1024, labels, lambda: 0.0, kv_role=kv_role)


def text(shown: VllmMetrics) -> list[str]:
    return shown.store.text().decode().splitlines()


def run_pair() -> tuple[VllmMetrics, VllmMetrics]:
    """One request over both, and one whose lease runs out and is read all the same."""
    pair = Pair()
    prefill, decode = metrics("kv_producer"), metrics("kv_consumer")
    pair.both("a")
    params = pair.prefill("b")
    pair.run()
    pair.decode("b", params)
    pair.run()
    assert pair.d.tokens["b-d"] == answer("b")
    for node, shown in ((pair.p, prefill), (pair.d, decode)):
        for step in node.steps:
            shown.on_step(0, step, step.at_ns)
        shown.on_transfers(0, node.engine.take_observations())
    return prefill, decode


def test_both_sides() -> None:
    prefill, decode = (text(shown) for shown in run_pair())
    labels = '{engine="0",model_name="m"}'
    assert f"vllm:nixl_num_kv_expired_reqs_total{labels} 1.0" in prefill
    assert f"vllm:nixl_num_notifications_after_expiry_total{labels} 1.0" in prefill
    assert f"vllm:nixl_num_failed_transfers_total{labels} 0.0" in decode
    assert f"vllm:nixl_bytes_transferred_count{labels} 2.0" in decode
    assert f"vllm:nixl_bytes_transferred_sum{labels} 224.0" in decode
    assert f"vllm:nixl_post_time_seconds_count{labels} 0.0" in decode
    assert f"vllm:external_prefix_cache_queries_total{labels} 200.0" in decode
    assert f"vllm:external_prefix_cache_hits_total{labels} 198.0" in decode
    source = 'engine="0",model_name="m",source='
    assert f'vllm:prompt_tokens_cached_by_source_total{{{source}"p2p"}} 198.0' in decode
    assert f'vllm:prompt_tokens_cached_by_source_total{{{source}"host"}} 0.0' in decode


def test_the_stages_are_shown_where_kv_is_consumed() -> None:
    stages = "vllm:num_requests_kv_fetch_by_stage{"
    assert sum(line.startswith(stages) for line in text(metrics("kv_both"))) == 3
    assert not any(line.startswith(stages) for line in text(metrics("kv_producer")))


def test_without_a_connector_there_is_nothing_of_it() -> None:
    assert not any("nixl" in line or "kv_fetch" in line for line in text(metrics(None)))


def bounds(shown: VllmMetrics, stem: str) -> list[float]:
    lines = [line for line in text(shown) if line.startswith(f"vllm:{stem}_bucket{{")]
    told = [line.partition('le="')[2].partition('"')[0] for line in lines]
    return [float(one) for one in told if one != "+Inf"]


def test_buckets_are_those_of_the_reference() -> None:
    nixl = metrics("kv_both")
    assert (bounds(nixl, "nixl_xfer_time_seconds")[0], bounds(nixl, "nixl_xfer_time_seconds")[-1]) == (0.005, 5)
    assert (bounds(nixl, "nixl_post_time_seconds")[0], bounds(nixl, "nixl_post_time_seconds")[-1]) == (0.001, 5)
    assert bounds(nixl, "nixl_bytes_transferred") == [2048 * 4**power for power in range(12)]
    assert bounds(nixl, "nixl_num_descriptors") == [
        10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000
    ]  # fmt: skip
    assert sum(line.startswith("vllm:nixl") and "_total{" in line for line in text(nixl)) == 4


def test_mooncake_has_series_of_its_own() -> None:
    labels = cache_config_labels(block_size=16, num_gpu_blocks=65, max_model_len=1024)
    shown = VllmMetrics("m", [0], 1024, labels, lambda: 0.0, kv_role="kv_producer", kv_mode="mooncake")
    assert not any("nixl" in line for line in text(shown))
    names = {line.split()[2] for line in text(shown) if line.startswith("# TYPE vllm:mooncake") and "_created" not in line}
    assert names == {
        "vllm:mooncake_xfer_time_seconds", "vllm:mooncake_bytes_transferred", "vllm:mooncake_num_descriptors",
        "vllm:mooncake_num_failed_transfers_total", "vllm:mooncake_num_failed_recvs_total",
        "vllm:mooncake_num_kv_expired_reqs_total",
    }  # fmt: skip
    assert bounds(shown, "mooncake_bytes_transferred") == [2048 * 4**power for power in range(12)]
