"""The tiers behind the pool: against naive sets, and as the engine and its events show them."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rig import STEP_NS, Rig, replay, request
from tests.core.test_engine_properties import arrivals, build, configs

from windtunnel.core.kv.blocks import NULL_BLOCK, BlockPool
from windtunnel.core.kv.tiers import HOST, Tier, runs_of
from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from windtunnel.core.pacing import Duration, RequestPacing


class Media:
    """What an index learns that keeps the media apart."""

    def __init__(self) -> None:
        self.gpu: set[bytes] = set()
        self.cpu: set[bytes] = set()
        self.disk: set[bytes] = set()

    def of(self, medium: str) -> set[bytes]:
        return {"GPU": self.gpu, "CPU": self.cpu, "STORAGE": self.disk}[medium]

    def fold(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.gpu.clear()
            self.cpu.clear()
            self.disk.clear()
            return
        known = self.of(event.medium)
        if isinstance(event, BlockStored):
            assert not known & set(event.block_hashes), "stored twice"
            known |= set(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert set(event.block_hashes) <= known, "removed twice"
            known -= set(event.block_hashes)


class TieredRig(Rig):
    """Compares each tier with a replay of its events after every step."""

    def __init__(self, *args: Any, **config: Any) -> None:
        self.media = Media()
        super().__init__(*args, **config)

    def _fold(self, step: Any) -> None:
        events, step.kv_events = step.kv_events, ()
        super()._fold(step)
        step.kv_events = events
        for event in events:
            self.media.fold(event)

    def check(self) -> None:
        assert self.media.gpu == self.engine.cached_hashes
        assert self.media.cpu == self.engine.host_hashes
        assert self.media.disk == self.engine.disk_hashes
        assert not self.media.gpu & self.media.cpu
        assert not (self.media.gpu | self.media.cpu) & self.media.disk

    def ran(self, name: str, prompt: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        self.submit(request(name, prompt, max_tokens, **more))
        self.run()
        self.check()
        detail = next(t.detail for t in self.log if t.event is Event.SCHEDULE and t.request_id == name)
        assert detail is not None
        return dict(detail)


PROMPT = list(range(5_000, 5_064))


def crowd_out(rig: TieredRig, name: str = "crowd") -> None:
    """Fill the pool of 8 usable blocks once."""
    rig.ran(name, 100, 20)


def test_what_falls_out_of_the_pool_comes_back_from_the_host() -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=100)
    assert rig.ran("a", PROMPT) == {"prompt_tokens": 64, "cached_tokens": 0}
    crowd_out(rig)
    assert len(rig.media.cpu) == 4
    assert rig.ran("b", PROMPT) == {"prompt_tokens": 64, "cached_tokens": 48, "host_tokens": 48}
    assert (sum(rig.stats("prefix_hits")), sum(rig.stats("external_hits"))) == (0, 48)
    assert sum(rig.stats("external_queries")) == 64 + 100 + 64


def test_without_a_tier_it_is_computed_again() -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert rig.ran("b", PROMPT)["cached_tokens"] == 0
    assert (sum(rig.stats("external_queries")), rig.engine.host_hashes) == (0, frozenset())


def test_each_block_that_comes_back_lengthens_the_step() -> None:
    def first_token_ns(**config: Any) -> int:
        rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=100, **config)
        rig.ran("a", PROMPT)
        crowd_out(rig)
        began = rig.now_ns
        rig.submit(request("b", PROMPT, 1))
        rig.run()
        return rig.now_ns - began

    assert first_token_ns() == STEP_NS
    assert first_token_ns(host_block_ns=70) == STEP_NS + 3 * 70


def test_at_its_own_pace_the_first_token_waits_instead() -> None:
    def first_token_ns(**config: Any) -> int:
        pacing = RequestPacing(Random(1), Duration(500), Duration(10))
        rig = TieredRig(pacing, num_blocks=9, max_model_len=128, host_blocks=100, **config)
        rig.ran("a", PROMPT)
        crowd_out(rig)
        began = rig.now_ns
        rig.submit(request("b", PROMPT, 1))
        rig.run()
        return rig.now_ns - began

    assert first_token_ns(host_block_ns=70) == first_token_ns() + 3 * 70


def test_the_oldest_goes_first_when_the_tier_is_full() -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=2)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert len(rig.engine.host_hashes) == 2
    assert rig.ran("b", PROMPT)["host_tokens"] == 32, "the tail of a sequence leaves the pool first, its head last"


def test_what_comes_back_makes_room_for_what_it_pushes_out() -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=4)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert rig.ran("b", [*PROMPT[:48], *range(16)], 1)["host_tokens"] == 48
    assert len(rig.engine.host_hashes) == 4, "the tail of the first prompt is still there"


def test_a_prefix_may_lie_in_turns_in_both() -> None:
    pool = BlockPool(5, 1, collect_events=True, host_blocks=10)
    hashes = [bytes([number]) for number in range(4)]
    blocks = pool.allocate(4)
    pool.enter(blocks, hashes, 0, 4)
    pool.free([blocks[1]])
    held = [blocks[0], blocks[2], blocks[3]]
    (taken,) = pool.allocate(1)
    assert taken == blocks[1]
    assert pool.lookup(hashes, 4) == [blocks[0]]
    assert pool.lookup_tiers(hashes, 4) == [blocks[0], NULL_BLOCK, blocks[2], blocks[3]]
    assert pool.lookup_tiers(hashes, 3) == [blocks[0], NULL_BLOCK, blocks[2]]
    pool.check_integrity([("me", [taken, *held])])


def test_what_the_host_has_no_room_for_comes_back_from_disk() -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=1, disk_blocks=100)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert len(rig.engine.host_hashes) == 1 and len(rig.engine.disk_hashes) >= 3
    assert rig.ran("b", PROMPT) == {"prompt_tokens": 64, "cached_tokens": 48, "host_tokens": 16, "disk_tokens": 32}
    assert (sum(rig.stats("external_hits")), sum(rig.stats("disk_hits"))) == (48, 32)


def test_the_disk_has_a_price_and_a_size_of_its_own() -> None:
    def step_ns(**config: Any) -> int:
        rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=1, disk_blocks=100, **config)
        rig.ran("a", PROMPT)
        crowd_out(rig)
        started_ns = rig.now_ns
        rig.ran("b", PROMPT, 1)
        return rig.now_ns - started_ns

    assert step_ns(host_block_ns=7, disk_block_ns=300) - step_ns() == 7 + 2 * 300
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=1, disk_blocks=1)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert len(rig.engine.disk_hashes) == 1


def test_a_disk_needs_a_host_in_front_of_it() -> None:
    with pytest.raises(ValueError, match="disk_blocks is 5: needs host_blocks"):
        TieredRig(disk_blocks=5)


@pytest.mark.parametrize("disk_blocks", [0, 50])
def test_a_reset_clears_both(disk_blocks: int) -> None:
    rig = TieredRig(num_blocks=9, max_model_len=128, host_blocks=2 if disk_blocks else 100, disk_blocks=disk_blocks)
    rig.ran("a", PROMPT)
    crowd_out(rig)
    assert rig.engine.host_hashes
    assert rig.engine.reset_prefix_cache(rig.now_ns)
    assert not rig.engine.host_hashes and not rig.engine.disk_hashes
    assert rig.ran("b", PROMPT)["cached_tokens"] == 0


def test_a_tier_that_shares_a_block_with_the_pool_is_found_out() -> None:
    pool = BlockPool(4, 1, host_blocks=2)
    blocks = pool.allocate(1)
    pool.enter(blocks, [b"x"], 0, 1)
    assert pool.tier is not None
    pool.tier.keep(b"x")
    with pytest.raises(AssertionError, match="in two tiers"):
        pool.check_integrity([("me", blocks)])


def test_runs_and_limits() -> None:
    assert runs_of([1, 2, 5, 7, 8]) == [(1, 3), (5, 6), (7, 9)]
    assert runs_of([]) == []
    with pytest.raises(ValueError, match="capacity is 0"):
        Tier(HOST, 0, None)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 6))
def test_a_lookup_finds_the_union_of_naive_sets(seed: int, capacity: int, disk_capacity: int) -> None:
    """Sequences over a small alphabet come, are entered, and go; a tier is a list, oldest first."""
    chance = Random(seed)
    pool = BlockPool(9, 1, collect_events=True, host_blocks=capacity, disk_blocks=disk_capacity)
    media, host, disk = Media(), list[bytes](), list[bytes]()
    held: dict[str, list[int]] = {}
    for number in range(80):
        if held and (chance.random() < 0.5 or pool.free_blocks < 4):
            pool.free(held.pop(chance.choice(sorted(held))))
        else:
            count = chance.randrange(1, 4)
            blocks = pool.allocate(count)
            text = [chance.choice("ab") for _ in range(count)]
            hashes = ["".join(text[: at + 1]).encode() for at in range(count)]
            pool.stored([digest for digest in hashes if digest not in pool.cached_hashes], None, (), None, ())
            pool.enter(blocks, hashes, 0, count)
            held[str(number)] = blocks
        for event in pool.take_events():
            media.fold(event)
            _follow(host, event, capacity, disk, disk_capacity)
        assert pool.tier is not None
        assert media.gpu == pool.cached_hashes
        assert media.cpu == pool.tier.hashes == set(host)
        assert media.disk == set(disk) == (pool.tier.behind.hashes if pool.tier.behind else set())
        union = media.gpu | media.cpu | media.disk
        path = [b"aba"[:stop] for stop in (1, 2, 3)]
        expected = next((at for at, digest in enumerate(path) if digest not in union), 3)
        found = pool.lookup_tiers(path, 3)
        assert len(found) == expected
        assert all((block == NULL_BLOCK) == (digest not in media.gpu) for block, digest in zip(found, path, strict=False))
        pool.check_integrity(held.items())


def _follow(host: list[bytes], event: KvEvent, capacity: int, disk: list[bytes], disk_capacity: int) -> None:
    """The naive tiers: what leaves the GPU is put at the end, what is over the size goes from the front to the next."""
    if isinstance(event, BlockRemoved) and event.medium == "GPU":
        host += event.block_hashes
        over = max(0, len(host) - capacity)
        disk += host[:over]
        del host[:over]
        del disk[: max(0, len(disk) - disk_capacity)]
    elif isinstance(event, BlockStored) and event.medium == "GPU":
        host[:] = [digest for digest in host if digest not in event.block_hashes]
        disk[:] = [digest for digest in disk if digest not in event.block_hashes]


@settings(max_examples=60, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=12), configs, st.integers(1, 30), st.integers(0, 9))
def test_any_run_of_the_engine_keeps_all_media_exact(
    requests: Any, config: dict[str, Any], host_blocks: int, disk_blocks: int
) -> None:
    needed = 160 // config["block_size"] + 2
    values = {**config, "num_blocks": max(config["num_blocks"], needed), "max_model_len": 160, "host_blocks": host_blocks}
    values["disk_blocks"] = disk_blocks
    rig = UncheckedCopies(host_block_ns=9, **values)
    for number, arrival in enumerate(sorted(requests, key=lambda one: one.at_ns)):
        rig.run(lambda: rig.now_ns >= arrival.at_ns)  # noqa: B023 (called at once)
        rig.now_ns = max(rig.now_ns, arrival.at_ns)
        rig.submit(build(f"r{number}", arrival))
    rig.run()
    rig.check()
    assert not rig.engine.live()


class UncheckedCopies(TieredRig):
    """Two sequences may compute the same block at once, and then it is stored twice."""

    def _fold(self, step: Any) -> None:
        events, step.kv_events = step.kv_events, ()
        super()._fold(step)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.media.fold(event)
            else:
                replay_medium(self.media, event)


def replay_medium(media: Media, event: BlockStored | BlockRemoved) -> None:
    if event.medium == "GPU":
        replay(media.gpu, event)
        return
    known = media.of(event.medium)
    if isinstance(event, BlockStored):
        known |= set(event.block_hashes)
    else:
        known -= set(event.block_hashes)
