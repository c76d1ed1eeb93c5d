"""Prefix caching and KV events as the engine shows them."""

import dataclasses

from tests.core.rig import Rig, expected, lora, request

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import BlockRemoved, BlockStored

PROMPT = list(range(64))


def ran(rig: Rig, request_id: str, *args: object, **more: object) -> int:
    """Run one request to its end; its cached tokens."""
    rig.submit(request(request_id, *args, **more))  # type: ignore[arg-type]
    rig.run()
    scheduled = next(t for t in rig.log if t.event is Event.SCHEDULE and t.request_id == request_id)
    assert scheduled.detail is not None
    return int(scheduled.detail["cached_tokens"])


def test_the_same_prompt_hits_all_but_its_last_block() -> None:
    rig = Rig()
    assert ran(rig, "a", PROMPT) == 0
    assert ran(rig, "b", PROMPT) == 48, "at least one token is always computed"
    assert ran(rig, "c", [*PROMPT, 7]) == 64
    assert ran(rig, "d", [*PROMPT[:40], 7, 8, 9]) == 32
    assert (sum(rig.stats("prefix_queries")), sum(rig.stats("prefix_hits"))) == (64 + 64 + 65 + 43, 48 + 64 + 32)


def test_the_first_output_says_how_many_tokens_were_cached() -> None:
    rig = Rig()
    ran(rig, "a", PROMPT)
    rig.submit(request("b", PROMPT))
    assert rig.step().outputs[0].cached_tokens == 48


def test_an_answer_sent_back_hits_the_blocks_it_was_made_in() -> None:
    rig = Rig()
    ran(rig, "a", PROMPT, 40)
    answer = expected("a", 40)
    assert ran(rig, "b", [*PROMPT, *answer]) == (64 + 39) // 16 * 16, "the last token's KV was never computed"


def test_salt_and_adapter_separate_what_is_otherwise_equal() -> None:
    rig = Rig()
    ran(rig, "a", PROMPT)
    assert ran(rig, "salt", PROMPT, cache_salt="s") == 0
    assert ran(rig, "lora", PROMPT, lora=lora("x")) == 0
    assert ran(rig, "salt2", PROMPT, cache_salt="s") == 48
    assert ran(rig, "lora2", PROMPT, lora=lora("x")) == 48


def test_without_prefix_caching_nothing_is_hit_counted_or_published() -> None:
    rig = Rig(enable_prefix_caching=False)
    ran(rig, "a", PROMPT)
    assert ran(rig, "b", PROMPT) == 0
    assert sum(rig.stats("prefix_queries")) == 0
    assert rig.cached == rig.engine.cached_hashes == set()


def test_a_readmission_is_no_prefix_query() -> None:
    rig = Rig(num_blocks=11, max_model_len=160)
    rig.submit(request("a", 64, 40), request("b", 64, 40))
    rig.run()
    assert rig.count(Event.PREEMPT) > 0
    assert (sum(rig.stats("prefix_queries")), sum(rig.stats("prefix_hits"))) == (128, 0)


def test_blocks_are_published_chunk_by_chunk_as_they_are_computed() -> None:
    rig = Rig(max_num_batched_tokens=24)
    rig.submit(request("a", PROMPT, 1))
    rig.run()
    events = [[len(event.block_hashes) for event in step.kv_events] for step in rig.steps]
    assert events == [[1], [2], [1]]
    first, second, third = (event for step in rig.steps for event in step.kv_events)
    assert first.parent_hash is None
    assert second.parent_hash == first.block_hashes[-1]
    assert second.token_ids == tuple(PROMPT[16:48])
    assert third.block_size == 16


def test_decoded_blocks_are_published_one_by_one() -> None:
    rig = Rig()
    rig.submit(request("a", 15, 34))
    rig.run()
    stored = [event for step in rig.steps for event in step.kv_events]
    assert [len(event.block_hashes) for event in stored] == [1, 1, 1]
    tokens = (*request("a", 15).prompt_token_ids, *expected("a", 34))
    assert tuple(token for event in stored for token in event.token_ids) == tokens[:48]


def test_an_event_names_adapter_and_salt() -> None:
    rig = Rig()
    rig.submit(request("a", PROMPT, 1, lora=lora("x"), cache_salt="s"))
    (event,) = rig.step().kv_events
    assert event.lora == (lora("x").lora_id, "x")
    assert event.extra_keys == (("x", "s"), ("x",), ("x",), ("x",))


def test_hits_are_reported_on_request() -> None:
    rig = Rig()
    ran(rig, "a", PROMPT)
    rig.submit(request("b", PROMPT, 1, report_cached_blocks=True))
    events = rig.step().kv_events
    assert [len(event.block_hashes) for event in events] == [3, 1]


def test_eviction_takes_the_oldest_tails_first_and_says_so() -> None:
    rig = Rig(num_blocks=11, max_model_len=160)
    ran(rig, "a", list(range(64)), 1)
    ran(rig, "b", list(range(100, 196)), 1)
    removed = [event for step in rig.steps for event in step.kv_events if isinstance(event, BlockRemoved)]
    assert removed == []
    ran(rig, "c", list(range(200, 216)), 1)
    assert ran(rig, "a2", list(range(64)), 1) == 48, "its last block is gone, its prefix is not"
    assert rig.cached == rig.engine.cached_hashes


def test_two_who_compute_the_same_at_once_publish_twice_and_forget_once() -> None:
    rig = Rig(num_blocks=11, max_model_len=160)
    rig.submit(request("a", PROMPT, 1), request("b", PROMPT, 1))
    rig.run()
    stored = [event for step in rig.steps for event in step.kv_events if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [4, 4]
    ran(rig, "big", 150, 1)
    assert rig.cached == rig.engine.cached_hashes


def test_an_aborted_prefill_leaves_what_it_computed_in_the_cache() -> None:
    rig = Rig(max_num_batched_tokens=32)
    rig.submit(request("a", PROMPT))
    rig.step()
    rig.abort("a")
    rig.run()
    assert rig.states["a"] is State.ABORTED
    assert ran(rig, "b", PROMPT) == 32


def test_hashes_made_beforehand_are_used_and_completed() -> None:
    rig = Rig()
    first = request("a", PROMPT, 20)
    hashes = rig.engine.hasher.prompt_hashes(first)
    rig.submit(dataclasses.replace(first, prompt_hashes=hashes[:3]))
    rig.run()
    assert set(hashes) < rig.engine.cached_hashes
    assert len(rig.engine.cached_hashes) == (64 + 19) // 16
    assert ran(rig, "b", PROMPT) == 48
    rig.submit(dataclasses.replace(request("forged", PROMPT, 1), prompt_hashes=[b"x" * 32] * 4))
    rig.run()
    assert b"x" * 32 in rig.cached, "the engine takes them as they are"


def test_blocks_looked_up_beforehand_are_a_hint_that_is_checked() -> None:
    rig = Rig()
    assert ran(rig, "a", PROMPT) == 0
    hashes = rig.engine.hasher.prompt_hashes(request("b", PROMPT))
    blocks = rig.engine.foresee(hashes)
    assert len(blocks) == 4
    for name, told in (("right", blocks), ("wrong", blocks[::-1]), ("half", [*blocks[:2], 60, 61]), ("none", [])):
        assert ran(rig, name, PROMPT, prompt_hashes=hashes, prompt_blocks=told) == 48
