"""The roofline: numbers checked by hand, monotone in everything that costs, and presets that are plausible."""

import pytest

from windtunnel.core.pacing import StepPlan
from windtunnel.core.physics import GPUS, MODELS, Gpu, Model, PhysicsPacing

PLAIN = Gpu("plain", 1e12, 1e11, 1e10, "test", 1.0, 1.0, 0, 0)
SMALL = Model("small", 2, 100, 4, 2, 25, 1000, 1.1e6, "test")
"""1 M linear parameters; KV: 2 x 2 x 2 x 25 x 2 = 400 bytes a token."""


def ns(plan: StepPlan, gpu: Gpu = PLAIN, model: Model = SMALL, tp: int = 1) -> int:
    return PhysicsPacing(gpu, model, tp).step_ns(plan)


def test_a_small_decode_step_reads_weights_and_cache() -> None:
    # Weights 2 MB / 100 GB/s = 20 us; cache (1000 + 1) x 400 B / 100 GB/s = 4.004 us; arithmetic is 2 us and 0.8 us: below.
    assert ns(StepPlan(0, 1, 1000)) == 24_004


def test_a_large_prefill_step_computes() -> None:
    # Linear 2 x 1e6 x 1000 / 1e12 = 2 ms; attention 4 x 2 x 4 x 25 x 500500 / 1e12 = 0.4004 ms.
    assert ns(StepPlan(1000, 0, 1000, 500_500)) == 2_400_400


def test_tensor_parallel_halves_the_work_and_adds_all_reduces() -> None:
    # 12.002 us, and 2 x 2 layers x (2 x 1/2 x 1 x 100 x 2 B / 10 GB/s = 20 ns).
    assert ns(StepPlan(0, 1, 1000), tp=2) == 12_002 + 80


def test_a_cache_with_fewer_heads_than_gpus_is_replicated() -> None:
    four = PhysicsPacing(PLAIN, SMALL, 4)
    assert four.attention_s(StepPlan(0, 1, 1000)) == pytest.approx(
        PhysicsPacing(PLAIN, SMALL, 2).attention_s(StepPlan(0, 1, 1000))
    )


def test_one_token_of_a_mixture_touches_its_active_parameters_and_many_touch_all() -> None:
    mixture = MODELS["qwen3-30b-a3b"]
    active = mixture.active_parameters
    assert active is not None
    assert mixture.touched_parameters(1) == pytest.approx(active - mixture.vocab * mixture.hidden)
    assert mixture.touched_parameters(1) == pytest.approx(mixture.active_linear_parameters)
    assert mixture.touched_parameters(4096) == pytest.approx(mixture.linear_parameters, rel=1e-6)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_more_of_anything_never_takes_less(gpu: Gpu, model: Model) -> None:
    plan = StepPlan(64, 8, 4000, 64 * 500)
    for field in StepPlan._fields:
        series = [ns(plan._replace(**{field: factor * getattr(plan, field)}), gpu, model) for factor in (1, 2, 16, 256)]
        assert series == sorted(series), field
        assert field == "decode_seqs" or series[-1] > series[0]


def test_an_8b_model_decodes_at_the_speed_of_memory() -> None:
    """15 GB of weights at 80 % of 3.35 TB/s and 1 ms beside: 6.6 ms a token."""
    assert ns(StepPlan(0, 1, 100), GPUS["h100"], MODELS["llama-3.1-8b"]) == pytest.approx(6.6e6, rel=0.01)


def test_speed_divides_and_heads_must_divide() -> None:
    plan = StepPlan(0, 1, 1000)
    assert PhysicsPacing(PLAIN, SMALL, 1, 10.0).step_ns(plan) == 2400
    assert PhysicsPacing(PLAIN, SMALL).step_ns(StepPlan(0, 0, 0)) == 0
    with pytest.raises(ValueError, match="tensor_parallel is 3: must divide the 4 attention heads of small"):
        PhysicsPacing(PLAIN, SMALL, 3)


def test_every_preset_names_its_source() -> None:
    assert all(preset.source for preset in (*GPUS.values(), *MODELS.values()))
