"""Kernel, lengths, workloads, policies, scenarios: each by itself."""

import json
from pathlib import Path
from random import Random
from statistics import mean, pvariance

import numpy as np
import pytest

from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import S
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.lengths import parse_lengths
from windtunnel.sim.policies import BUILT_IN, EngineState, PolicyContext, PrefixAware, load_policy
from windtunnel.sim.results import GapHistogram
from windtunnel.sim.scenario import ScenarioError, WorkloadSpec, load_scenario, parse_scenario
from windtunnel.sim.tokens import HIGHEST, LOWEST, Answer, random_tokens
from windtunnel.sim.workload import OpenLoop


def test_kernel_orders_by_time_then_by_request() -> None:
    kernel, seen = Kernel(0), []
    kernel.at(5, lambda: seen.append("b"))
    kernel.at(1, lambda: kernel.at(5, lambda: seen.append("d")))
    kernel.at(5, lambda: seen.append("c"))
    kernel.at(2, lambda: seen.append("a"))
    kernel.at(3, lambda: seen.append("never")).cancel()
    assert kernel.run(until_ns=100)
    assert seen == ["a", "b", "c", "d"] and kernel.now_ns == 100


def test_kernel_stops_at_the_event_limit() -> None:
    kernel = Kernel(0)

    def again() -> None:
        kernel.after(1, again)

    again()
    assert not kernel.run(max_events=50) and kernel.events == 50


def test_kernel_drops_cancelled_timers() -> None:
    kernel = Kernel(0)
    for _ in range(200_000):
        kernel.after(10**12, lambda: None).cancel()
    assert len(kernel._heap) < 100_000


def test_streams_are_independent() -> None:
    kernel, other = Kernel(3), Kernel(3)
    kernel.stream("a").random()
    assert kernel.stream("b").random() == other.stream("b").random()


@pytest.mark.parametrize(
    "text", ["0", "-3", "uniform:5", "uniform:9:3", "poisson:3:4", "normal:0:1", "x", 1.5, True, "choice:"]
)
def test_lengths_refuse(text: object) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_lengths(text)


def test_lengths_draw_what_they_say() -> None:
    draws = Random(1)
    values = [parse_lengths("lognormal:300:100").draw(draws) for _ in range(20_000)]
    assert mean(values) == pytest.approx(300, rel=0.02) and pvariance(values) ** 0.5 == pytest.approx(100, rel=0.05)
    assert {parse_lengths("choice:1,7").draw(draws) for _ in range(50)} == {1, 7}


@pytest.mark.parametrize(
    ("spec", "spread"),
    [({"kind": "poisson"}, 1.0), ({"kind": "constant"}, 0.0), ({"kind": "gamma", "shape": 0.25}, 2.0)],
)
def test_open_loops_have_their_rate_and_spread(spec: dict[str, object], spread: float) -> None:
    workload = OpenLoop(WorkloadSpec.model_validate({"rate": 50, "prompt_tokens": 1, **spec}), Kernel(1).stream, 400 * S)
    times = np.array([at_ns for at_ns, _question in workload.arrivals()]) / S
    gaps = np.diff(times)
    assert len(times) == pytest.approx(50 * 400, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, abs=0.1)


def test_on_off_is_silent_while_off() -> None:
    spec = WorkloadSpec.model_validate({"kind": "onoff", "rate": 100, "on": "1s", "off": "3s", "prompt_tokens": 1})
    times = [at_ns for at_ns, _question in OpenLoop(spec, Kernel(1).stream, 40 * S).arrivals()]
    assert len(times) == pytest.approx(1000, rel=0.15)
    assert all(at_ns % (4 * S) <= S for at_ns in times)


def test_tokens() -> None:
    tokens = random_tokens(Random(1), 5000)
    assert min(tokens) >= LOWEST and max(tokens) <= HIGHEST and len(set(tokens)) > 4000
    answer = Answer(7)
    whole = list(answer.token_ids(0, 200_000))
    assert len(whole) == 200_000 and list(answer.token_ids(70_000, 50)) == whole[70_000:70_050]


def _request(prompt: tuple[int, ...], session: str | None = None) -> EngineRequest:
    return EngineRequest("r", prompt, Answer(0), 1, 0, session_id=session)


def test_prefix_aware_follows_the_events() -> None:
    hasher = BlockHasher("sha256", 4)
    policy, engines = PrefixAware(hasher), [EngineState(index, "unified") for index in range(3)]
    request = _request(tuple(range(12)))
    hashes = hasher.prompt_hashes(request)
    stored = BlockStored(tuple(hashes), None, request.prompt_token_ids, 4, None, (None,) * 3)
    policy.on_kv_events(2, [stored])
    policy.on_kv_events(1, [stored._replace(block_hashes=tuple(hashes[:1]))])
    assert policy.choose(request, engines).index == 2
    policy.on_kv_events(2, [BlockRemoved((hashes[0],))])
    assert policy.choose(request, engines).index == 1
    policy.on_kv_events(1, [AllBlocksCleared()])
    assert policy.choose(request, engines).index == 0
    policy.on_kv_events(2, [stored])
    engines[2].in_flight = 40
    assert policy.choose(request, engines).index == 0


def test_power_of_two_avoids_the_loaded() -> None:
    policy = BUILT_IN["power-of-two"](PolicyContext(Random(1), BlockHasher("sha256", 4), 4))
    engines = [EngineState(index, "unified", in_flight=9 if index == 0 else 0) for index in range(4)]
    chosen = [policy.choose(_request((1,)), engines).index for _ in range(400)]
    assert 0 < chosen.count(0) < 60


def test_sessions_stay_until_their_engine_goes() -> None:
    policy = BUILT_IN["session-affinity"](PolicyContext(Random(1), BlockHasher("sha256", 4), 4))
    engines = [EngineState(index, "unified") for index in range(3)]
    assert policy.choose(_request((1,), "s"), engines).index == 0
    engines[0].in_flight = 50
    assert policy.choose(_request((1,), "s"), engines).index == 0
    assert policy.choose(_request((1,), "s"), engines[1:]).index == 1


POLICY_FILE = """
class Last:
    def choose(self, request, engines):
        return engines[-1]

    def on_kv_events(self, engine, events):
        pass


def make_policy(context):
    return Last()
"""


def test_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    context = PolicyContext(Random(1), BlockHasher("sha256", 4), 2)
    engines = [EngineState(index, "unified") for index in range(2)]
    assert load_policy("", str(path), context).choose(_request((1,)), engines).index == 1
    path.write_text("def make_policy(context):\n    return 3\n")
    with pytest.raises(ScenarioError, match="no method choose"):
        load_policy("", str(path), context)
    path.write_text("")
    with pytest.raises(ScenarioError, match="no function make_policy"):
        load_policy("", str(path), context)
    with pytest.raises(ScenarioError, match="does not exist"):
        load_policy("", str(tmp_path / "none.py"), context)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"duration": "20"}, "duration: '20' is not a duration"),
        ({"engine": []}, "engine: is not a key of a scenario"),
        ({"workload": {"rate": 0}}, "workload.rate: Input should be greater than 0"),
        ({"workload": {"prompt_tokens": "many"}}, "workload.prompt_tokens: 'many' is not a number of tokens"),
        ({"policy": "best"}, "policy is 'best': must be one of"),
        ({"faults": [{"at": "1s", "engine": 3, "kind": "crash"}]}, "engine 3 does not exist"),
        ({"workload": {"kind": "trace"}}, "trace is the file"),
        ({"workload": {"kind": "onoff", "on": "0"}}, "workload.on"),
    ],
)
def test_scenario_errors_name_the_key(values: dict[str, object], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(values)
    assert said in str(caught.value)


def test_scenario_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('seed = 4\n[[engines]]\ncount = 2\nconfig = { max_num_seqs = 8 }\n[workload]\nkind = "closed"\nusers = 3\n')
    scenario = load_scenario(path, {"engines.0.config.max_num_seqs": 16, "workload.users": 5})
    assert (scenario.seed, scenario.engines[0].count, scenario.workload.users) == (4, 2, 5)
    assert scenario.engines[0].config == {"max_num_seqs": 16}
    with pytest.raises(ScenarioError, match="not a position"):
        load_scenario(path, {"engines.1.count": 3})
    path.write_text("seed = \n")
    with pytest.raises(ScenarioError, match="not TOML"):
        load_scenario(path)


def test_gap_quantiles_are_close() -> None:
    gaps = np.array([int(value) for value in np.random.default_rng(1).lognormal(16, 1, 100_000)])
    histogram = GapHistogram()
    for part in np.array_split(gaps, 7):
        histogram.add(part)
    for percent in (50, 90, 99):
        assert histogram.quantile_ns(percent) == pytest.approx(np.percentile(gaps, percent), rel=0.01)
    assert json.loads(json.dumps(histogram.summary()))["count"] == 100_000
