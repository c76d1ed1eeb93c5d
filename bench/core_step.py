"""What one step costs in `core`: CPU time of pure decode steps, of a long prompt, and memory of a full prefix cache.

Times are CPU time, the least of many short runs: a neighbour that empties the caches can only make a run longer. Each stands
beside its ratio to the yardstick, a loop in the same interpreter, which a slow machine slows down alike.

Usage: python -m bench.core_step [--json]
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from windtunnel.core.engine import Engine
from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.pacing import Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine
from windtunnel.core.sources import OracleSource
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig

VOCABULARY = tuple((token,) for token in range(512))
RUNS = 7
STEPS_AT_ONCE = 32
"""Two blocks: each short run fills as many blocks as the next."""


def engine_with(sequences: int, pacing: Pacing, *, events: bool = False) -> VllmEngine:
    """An engine in which all sequences decode; prompts differ in length, so that block ends fall into different steps."""
    config = VllmEngineConfig(
        num_blocks=sequences * 200 + 1,
        max_model_len=3000,
        max_num_seqs=sequences,
        max_num_batched_tokens=1 << 20,
        collect_kv_events=events,
    )
    engine = VllmEngine(config, pacing)
    for number in range(sequences):
        engine.submit([_request(number)], 0)
    return engine


def _request(number: int) -> EngineRequest:
    prompt = tuple(range(number, number + 100 + number % 61))
    return EngineRequest(f"cmpl-{number}-0", prompt, OracleSource(number, VOCABULARY, None), 2900, 0)


def step_us(sequences: int, runs: int = 60, *, events: bool = False) -> float:
    """Mean CPU time of one pure decode step in the best run, in microseconds."""
    return _step_us(engine_with(sequences, StepPacing(1_000_000, 0, 0), events=events), sequences, runs)


def sglang_step_us(sequences: int, runs: int = 60) -> float:
    """The same for SGLang's engine, pages of one token."""
    config = SglangEngineConfig(
        max_total_num_tokens=sequences * 3200,
        max_running_requests=sequences,
        chunked_prefill_size=-1,
        max_prefill_tokens=1 << 20,
    )
    engine = SglangEngine(config, StepPacing(1_000_000, 0, 0), random.Random(0))
    for number in range(sequences):
        engine.submit([_request(number)], 0)
    return _step_us(engine, sequences, runs)


def _step_us(engine: Engine, sequences: int, runs: int) -> float:
    now_ns = 20_000_000
    engine.advance(now_ns)

    def run() -> float:
        nonlocal now_ns
        started_ns = time.process_time_ns()
        for _ in range(STEPS_AT_ONCE):
            now_ns += 1_000_000
            (step,) = engine.advance(now_ns)
            assert len(step.outputs) == sequences
        return (time.process_time_ns() - started_ns) / STEPS_AT_ONCE / 1000

    return min(run() for _ in range(runs))


OWN_PACE = RequestPacing(random.Random(0), Duration(1_000_000, 300_000, "normal"), Duration(20_000_000, 5_000_000, "normal"))
NO_TIME = RequestPacing(random.Random(0))


def token_us(sequences: int, pacing: Pacing, tokens: int = 20_000) -> float:
    """Under pacing by sequence: microseconds for one token, a driver waking twice a millisecond."""
    engine = engine_with(sequences, pacing)
    for millisecond in range(1, 40):
        engine.advance(millisecond * 1_000_000)

    def run() -> float:
        made = 0
        started_ns = time.process_time_ns()
        while made < tokens:
            at_ns = engine.next_event_at()
            assert at_ns is not None
            made += sum(len(step.outputs) for step in engine.advance(at_ns + 500_000))
        return (time.process_time_ns() - started_ns) / made / 1000

    return min(run() for _ in range(5))


def long_prompt_ms(tokens: int = 100_000) -> float:
    """Hashing a prompt and matching it against a cache that holds all of it, in milliseconds of CPU."""
    hasher = BlockHasher("sha256", 16)
    request = EngineRequest("r", tuple(range(tokens)), OracleSource(1, VOCABULARY, 1), 1, 0)
    pool = BlockPool(tokens // 16 + 2, 16)
    pool.enter(pool.allocate(tokens // 16), hasher.prompt_hashes(request), 0, tokens // 16)

    def run() -> float:
        started_ns = time.process_time_ns()
        hashes = hasher.prompt_hashes(request)
        assert len(pool.lookup(hashes, len(hashes))) == tokens // 16
        return (time.process_time_ns() - started_ns) / 1e6

    return min(run() for _ in range(RUNS))


def longest_step_ms(engine: Engine, *, repeated: bool, tokens: int = 100_000) -> float:
    """The longest step of a prompt so long that asks for one token; everybody waits for it. The best of the runs.

    As with a server, block hashes and what is cached of them are made beforehand, where the engine takes them.
    """

    def run(number: int) -> float:
        prompt = tuple(range(number * tokens, (number + 1) * tokens))
        request = EngineRequest(f"r{at_ns}", prompt, OracleSource(1, VOCABULARY, 1), 1, at_ns)
        if isinstance(engine, VllmEngine):
            hashes = engine.hasher.prompt_hashes(request)
            request = replace(request, prompt_hashes=hashes, prompt_blocks=engine.foresee(hashes))
        engine.submit([request], at_ns)
        return max(_steps_ms(engine, at_ns))

    times = []
    for at_ns in range(RUNS + 1):
        times.append(run(0 if repeated else at_ns))
    return min(times[1:])


def _steps_ms(engine: Engine, at_ns: int) -> Iterator[float]:
    while engine.next_event_at() is not None:
        started_ns = time.process_time_ns()
        engine.advance(at_ns)
        yield (time.process_time_ns() - started_ns) / 1e6


def long_prompt_vllm() -> VllmEngine:
    return VllmEngine(VllmEngineConfig(num_blocks=65536, max_model_len=131072), StepPacing(0, 0, 0))


def long_prompt_sglang() -> SglangEngine:
    config = SglangEngineConfig(max_total_num_tokens=1 << 20, context_length=131072)
    return SglangEngine(config, StepPacing(0, 0, 0), random.Random(0))


def cached_blocks_mib(blocks: int = 1_000_000) -> float:
    """Memory of that many cached blocks with sha256 digests, in MiB."""
    tracemalloc.start()
    pool = BlockPool(blocks + 1, 16)
    taken = pool.allocate(blocks)
    for block in taken:
        pool.enter((block,), (block.to_bytes(32, "big"),), 0, 1)
    pool.free(taken)
    del taken
    used, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 2**20


def block_cycle_us(cached: int, blocks: int = 6_400) -> float:
    """For one block, beside so many cached ones: looked up, touched, freed, taken again, and entered under a new hash."""
    pool = BlockPool(cached + 1, 16)
    hashes = [number.to_bytes(32, "big") for number in range(cached)]
    taken = pool.allocate(cached)
    pool.enter(taken, hashes, 0, cached)
    pool.free(taken)
    fresh = cached

    def run() -> float:
        nonlocal fresh
        new = [(fresh + number).to_bytes(32, "big") for number in range(blocks)]
        fresh += blocks
        started_ns = time.process_time_ns()
        found = pool.lookup(hashes[-blocks:], blocks)
        pool.touch(found)
        pool.free(found)
        taken = pool.allocate(blocks)
        pool.enter(taken, new, 0, blocks)
        pool.free(taken)
        used_us = (time.process_time_ns() - started_ns) / blocks / 1000
        hashes.extend(new)
        return used_us

    return min(run() for _ in range(RUNS))


def yardstick_us() -> float:
    """100,000 additions in a loop: what this interpreter on this machine is worth at this moment."""

    def once() -> float:
        started_ns = time.process_time_ns()
        total = 0
        for number in range(100_000):
            total += number
        return (time.process_time_ns() - started_ns) / 1000

    return min(once() for _ in range(RUNS))


MEASURES: dict[str, Callable[[], float]] = {
    "yardstick_us": yardstick_us,
    "decode_step_us_256": lambda: step_us(256),
    "decode_step_us_256_with_kv_events": lambda: step_us(256, events=True),
    "decode_step_us_256_sglang": lambda: sglang_step_us(256),
    "decode_step_us_1024": lambda: step_us(1024, 20),
    "token_us_10000_sequences_own_pace": lambda: token_us(10_000, OWN_PACE),
    "token_us_256_sequences_as_fast_as_possible": lambda: token_us(256, NO_TIME),
    "hash_and_match_100k_tokens_ms": long_prompt_ms,
    "longest_step_of_100k_tokens_new_ms": lambda: longest_step_ms(long_prompt_vllm(), repeated=False),
    "longest_step_of_100k_tokens_repeated_ms": lambda: longest_step_ms(long_prompt_vllm(), repeated=True),
    "longest_step_of_100k_tokens_new_sglang_ms": lambda: longest_step_ms(long_prompt_sglang(), repeated=False),
    "longest_step_of_100k_tokens_repeated_sglang_ms": lambda: longest_step_ms(long_prompt_sglang(), repeated=True),
    "one_million_cached_blocks_mib": cached_blocks_mib,
    "block_cycle_us_ten_thousand_cached": lambda: block_cycle_us(10_000),
    "block_cycle_us_one_million_cached": lambda: block_cycle_us(1_000_000),
}


def run(names: Iterable[str] = MEASURES) -> dict[str, float]:
    """The measures by name, and of each time (`…_us…`, `…_ms`) how many yardsticks it is."""
    results = {name: round(MEASURES[name](), 3) for name in names}
    reference_us = results.get("yardstick_us") or yardstick_us()
    for name, value in list(results.items()):
        if name != "yardstick_us" and ("_us" in name or name.endswith("_ms")):
            in_us = value * (1000 if name.endswith("_ms") else 1)
            results[f"{name}_per_yardstick"] = round(in_us / reference_us, 4)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=MEASURES, action="append")
    arguments = parser.parse_args()
    results = run(arguments.only or MEASURES)
    if arguments.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:60} {value:12,.4f}")


if __name__ == "__main__":
    main()
