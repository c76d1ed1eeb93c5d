"""Every planted defect of a prefill/decode pair is found in real servers behind a balancer, and nothing is found without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.own_time import own_time
from tests.serve.live import live
from tests.serve.router.fake_worker import router
from tests.serve.vllm_pd.pair import MODEL, NIXL, Pair, engine_of, pair, until

from windtunnel.core.units import MS, S
from windtunnel.faults.catalogue import CATALOGUE, VLLM_PD
from windtunnel.lab.connection import How
from windtunnel.lab.findings import find, primary
from windtunnel.lab.plan import BystanderKind, Moment, Shape, StormPlan, Trigger
from windtunnel.lab.selftest import FURTHER
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import Target, make_target
from windtunnel.serve.sglang.disagg_flavour import DisaggFlavour
from windtunnel.wire.sglang.pairing import PrefillAddress

SCALE = 30.0
"""A lease takes a second."""
QUIET = StormPlan(
    victims=0,
    bystanders=2,
    bystander_kinds=(
        BystanderKind("completion", shape=Shape(max_tokens=8, stream=False)),
        BystanderKind("too long", shape=Shape(max_tokens=4000, stream=False), expect_status=400),
    ),
    later=0,
    sample_every_ns=40 * MS,
    quiet_deadline_ns=1_200 * MS,
    request_timeout_ns=5 * S,
    state_patience_ns=60 * S,
    linger_ns=100 * MS,
    time_scale=SCALE,
)


@dataclass(frozen=True)
class Scene:
    """Servers and a storm that show a defect, or nothing."""

    plan: StormPlan
    both: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    balancer: dict[str, Any] = field(default_factory=dict)
    old_reader: bool = False
    """Before the storm another decode has begun to read, and goes on for longer than the storm."""
    clean: tuple[str, ...] = ()
    """What is found without the defect."""


POOL = {"pacing__time_scale": SCALE, "scheduler__num_gpu_blocks": 130, "scheduler__max_model_len": 2048}
LONG = Shape(max_tokens=8, stream=False, prompt_words=600)
SCENES = {
    "plain": Scene(QUIET, POOL),
    "slow read": Scene(
        replace(QUIET, bystanders=1, bystander_kinds=(BystanderKind("long", shape=LONG),)),
        POOL,
        {"kv_transfer__bandwidth_gb_s": 0.0023},
    ),
    "leaving during a read": Scene(
        replace(
            QUIET,
            victims=4,
            hold=True,
            how=(How.FIN, How.RST),
            when=Trigger(Moment.TRANSFER, 0),
            victim=Shape(max_tokens=32, prompt_words=200),
            bystanders=6,
            bystander_concurrency=6,
            later=1,
            quiet_deadline_ns=1 * S,
            bystander_kinds=(BystanderKind("completion", shape=replace(LONG, prompt_words=300)),),
        ),
        POOL | {"scheduler__enable_prefix_caching": False},
        {"kv_transfer__transfer_latency_ns": 9 * S},
    ),
    "leaving between the legs": Scene(
        replace(
            QUIET,
            victims=4,
            how=(How.FIN, How.RST),
            when=Trigger(Moment.BETWEEN, 0),
            victim=Shape(max_tokens=32, prompt_words=200),
            bystanders=0,
        ),
        POOL,
        balancer={"between_legs_s": 0.4},
        old_reader=True,
        clean=("lease_expired",),
    ),
}
SHOWN_BY = {
    "load-into-freed-blocks": ("leaving during a read", "load-into-freed-blocks"),
    "load-end-forgotten": ("leaving during a read", "load-end-forgotten"),
    "late-load-kills-engine": ("leaving during a read", "late-load-kills-engine"),
    "ordered-reaper": ("leaving between the legs", "ordered-reaper"),
    "one-timeout": ("slow read", "one-timeout:30s"),
    "heartbeats-ignored": ("slow read", "heartbeats-ignored"),
    "notified-by-own-id": ("plain", "notified-by-own-id"),
    "refusal-tells-nobody": ("plain", "refusal-tells-nobody"),
}
"""Defect → the scene that shows it, and the defect as it is told to both servers."""


@asynccontextmanager
async def old_reader(pd: Pair) -> AsyncIterator[None]:
    """Its lease is the oldest, and the only one that is renewed."""
    slow = {"kv_transfer__told": NIXL, "kv_transfer__side_channel_port": 0, "kv_transfer__transfer_latency_ns": 3600 * S}
    async with live(**slow, **POOL) as reader:
        client = await Pair(pd.p, reader, pd.url, pd.client).decoding(await pd.prefilled())
        await until(lambda: engine_of(reader).outstanding()["loads"])
        yield
        client.leave("fin")


async def names_after(scene: Scene, *faults: str) -> list[str]:
    both = scene.both | {"faults": faults}
    async with pair(both, d=scene.decode, **scene.balancer) as pd:
        target = make_target(pd.url, MODEL, metrics_urls=[f"{pd.p.url}/metrics", f"{pd.d.url}/metrics"])
        if not scene.old_reader:
            result = await run_storm(target, scene.plan)
        else:
            async with old_reader(pd):
                result = await run_storm(target, scene.plan)
    return [finding.name for finding in primary(find(result))]


@pytest.fixture(autouse=True)
async def unhurried() -> AsyncIterator[None]:
    """Leases, reads and batches take as long as this process is given."""
    with own_time(asyncio.get_running_loop()):
        yield


@pytest.mark.parametrize("fault", SHOWN_BY)
async def test_a_planted_defect_is_named(fault: str) -> None:
    """On a busy machine a read that its client has left may outlast the lease, which is then found, too."""
    scene, told = SHOWN_BY[fault]
    due = CATALOGUE[fault].finding
    assert [name for name in await names_after(SCENES[scene], told) if name == due or name != "lease_expired"] == [due]


@pytest.mark.parametrize("scene", SCENES)
async def test_nothing_is_named_without_one(scene: str) -> None:
    assert await names_after(SCENES[scene]) == list(SCENES[scene].clean)


# SGLang

BATCH = 1 * S
"""A prefill batch holds one prompt: of the victims that leave during one, the one of the batch before is in the race."""
IN_THE_RACE = replace(
    QUIET,
    victims=5,
    how=(How.FIN, How.RST),
    when=Trigger(Moment.AFTER, 0, 5 * BATCH // 2),
    victim=Shape(prompt_words=200, max_tokens=200),
    bystanders=0,
    later=2,
    later_concurrency=1,
    quiet_before_later=False,
    quiet_deadline_ns=3 * BATCH,
    request_timeout_ns=30 * S,
    time_scale=1.0,
)
RACE = ("transfer-race:999999us", "peer-lost-on-abort")


@asynccontextmanager
async def sglang_pair(release: str, *faults: str) -> AsyncIterator[Target]:
    both: dict[str, Any] = {"engine": "sglang", "sglang__profile": release, "pacing__time_scale": SCALE}
    prefill = both | {"disagg__mode": "prefill", "disagg__bootstrap_port": 0, "disagg__dead_peer_ns": 3600 * S * 1000}
    prefill |= {"disagg__queue_size": 128, "disagg__transfer_latency_ns": 0}
    prefill |= {"sglang__chunked_prefill_size": -1, "sglang__max_prefill_tokens": 256}
    prefill |= {"pacing__model": "step", "pacing__step_base_ns": round(BATCH * SCALE)}
    prefill |= {"pacing__step_prefill_token_ns": 0, "pacing__step_decode_seq_ns": 0}
    async with (
        live(**prefill, faults=faults) as p,
        live(**both, disagg__mode="decode", pacing__itl_ns=150 * MS, disagg__listen_sockets=96) as d,
    ):
        flavour = p.server.flavour
        assert isinstance(flavour, DisaggFlavour)
        (part,) = flavour._parts
        prefills = (PrefillAddress(p.url, "127.0.0.1", part.bootstrap_port),)
        async with router(pd=True, prefills=prefills, decodes=(d.url,)) as url:
            yield make_target(url, MODEL, metrics_urls=[f"{p.url}/metrics", f"{d.url}/metrics"])


@pytest.mark.parametrize(
    ("release", "faults", "expected"),
    [("0.5.12", RACE, ["transfer_orphan"]), ("0.5.12", (), [])],
    ids=["planted", "without"],
)
async def test_a_status_that_overwrites_a_failure(release: str, faults: tuple[str, ...], expected: list[str]) -> None:
    """Whoever leaves in the race stays in the prefill's inflight queue (sglang #24522, #30352)."""
    async with sglang_pair(release, *faults) as target:
        result = await run_storm(target, IN_THE_RACE)
    assert [finding.name for finding in primary(find(result))] == expected


def test_the_self_test_has_cases_of_pairs() -> None:
    pairs = {case.fault: case.finding for case in FURTHER if CATALOGUE.get(case.fault, CATALOGUE["late-abort"]).pair}
    assert pairs.pop("transfer-race") == "transfer_orphan"
    assert pairs == {fault: CATALOGUE[fault].finding for fault in pairs} and pairs.keys() <= SHOWN_BY.keys() and len(pairs) == 5


def test_every_defect_of_a_pair_has_a_scene() -> None:
    assert set(SHOWN_BY) == {name for name, entry in CATALOGUE.items() if entry.pair == VLLM_PD}
