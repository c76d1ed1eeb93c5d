"""What all routes of one server share: settings, engine, jobs, metrics."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.core.history import RequestHistory
from windtunnel.core.outputs import StepOutput
from windtunnel.core.request import Lora
from windtunnel.core.tokenizer import BuiltinTokenizer, Tokenizer
from windtunnel.serve import asgi, failures
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import ServeConfig, UsageError, as_json
from windtunnel.serve.driver import EngineDriver, StepObserver
from windtunnel.serve.engines import make_pacing, with_hash_seed
from windtunnel.serve.flags import live_changes
from windtunnel.serve.flavour import Flavour, flavour_of
from windtunnel.serve.http11 import Cork
from windtunnel.serve.jobs import Jobs
from windtunnel.serve.keepalive import keep_alive
from windtunnel.serve.operator import OperatorState
from windtunnel.serve.planning import Planner, prepare
from windtunnel.serve.ranks import Ranks
from windtunnel.serve.seams import Seams, load
from windtunnel.serve.shared_port import GrpcRelay
from windtunnel.serve.sources import SourceMaker
from windtunnel.serve.stored import BackgroundRuns, StoredResponses
from windtunnel.serve.streams import StreamedAnswer
from windtunnel.wire.env import ResponseStore, ServerEnv
from windtunnel.wire.family import Generation, WireError
from windtunnel.wire.http import body_too_large
from windtunnel.wire.recorded import RecordedPlayer, RecordedResponses, read_lines

if TYPE_CHECKING:
    from windtunnel.serve.kv_events import KvPublisher

log = logging.getLogger("windtunnel.serve")

_SEED_STRIDE = 1_000_003
"""Between the random generators of two ranks."""


class Server:
    """One simulated server. Everything mutable in it belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, loop: asyncio.AbstractEventLoop) -> None:
        config = with_hash_seed(config)
        self.config = config
        self.loop = loop
        self.load = 0
        self.cork = Cork()
        self.operator = OperatorState(len(config.lora_modules))
        self._ready_ns = now_ns() + config.startup_ns
        self.seams: Seams = load(config.faults)
        self.flavour: Flavour = flavour_of(config, self.seams)
        self.planner = Planner(loop)
        self._chances = [random.Random(config.seed + rank * _SEED_STRIDE) for rank in range(config.data_parallel_size)]
        self._failing = random.Random(config.seed + 1)
        self._ids = random.Random()
        self.tokenizer = load_tokenizer(config)
        self.stored = StoredResponses(config.limits.stored_responses)
        self.background = BackgroundRuns(config.limits.stored_responses)
        self.env = self.flavour.env(make_env(config, self.tokenizer, self.new_id, self.stored), config)
        self._pacings = [make_pacing(config.pacing, chance) for chance in self._chances]
        self.engines: tuple[Any, ...] = tuple(
            self.seams.engine(self.flavour.engine(self._engine_config(config), pacing, chance))
            for pacing, chance in zip(self._pacings, self._chances, strict=True)
        )
        self.grpc_relay = GrpcRelay(config.limits.connections) if config.grpc_on_http_port else None
        self.history = RequestHistory(config.limits.history)
        self.metrics: Any = self.seams.metrics(self.flavour.metrics(config, self.engine.config))
        self.publishers = open_publishers(config, self.flavour, loop)
        self.driver = self._make_ranks()
        self._put_fronts()
        self.sources = SourceMaker(config.generation, self.tokenizer)
        self.recorded = load_recorded(config, self.tokenizer)
        self.jobs = Jobs(
            self.driver,
            self.metrics,
            self.tokenizer,
            self._make_source,
            self._suffix,
            config.limits.open_answers,
        )

    def new_id(self) -> str:
        """16 hex digits. Not seeded: two servers must not give the same ids."""
        return f"{self._ids.getrandbits(64):016x}"

    @property
    def engine(self) -> Any:
        """Rank 0, of the flavour's own class. Operator routes switch all ranks alike, so it also tells how they all are."""
        return self.engines[0]

    @property
    def kv_event_sources(self) -> dict[str, Any]:
        """What `/kv_event_sources` says: publisher settings for each rank; empty while KV events are off."""
        return {str(publisher.rank): publisher.source for publisher in self.publishers}

    @property
    def dead(self) -> bool:
        """An engine core has died; one is enough."""
        return any(self.flavour.dead(engine) for engine in self.engines)

    @property
    def ready(self) -> bool:
        """`--startup-duration` has passed."""
        return now_ns() >= self._ready_ns

    async def idle_or_resumed(self) -> None:
        """Until no job is at work or the operator has resumed the engine."""
        await self.operator.idle_or_resumed(asyncio.ensure_future(self.jobs.idle()))

    async def body(self, scope: asgi.Scope, receive: asgi.Receive) -> bytes:
        """A bounded request body; raises WireError (413, 408) or ClientGone."""
        limits = self.config.limits
        try:
            timeout_s = limits.body_timeout_ns / 1e9
            return await asgi.read_body(receive, limits.body_bytes, timeout_s, asgi.declared_bytes(scope))
        except asgi.BodyTooLarge:
            raise body_too_large(limits.body_bytes) from None
        except asgi.BodyTimeout:
            raise WireError("The request body did not arrive in time.", 408, "RequestTimeout") from None

    def preparing(self) -> Callable[[Generation], Generation]:
        """`prepare` for this server as it stands at this moment: for the planner's thread."""
        prefix = self.flavour.prefix_reader(self.engine) if self.config.scheduler.enable_prefix_caching else None
        return partial(prepare, prefix=prefix, identity=self.sources.identity)

    def unread(self, receive: asgi.Receive) -> asgi.Unread:
        return asgi.Unread(receive, self.config.limits.body_bytes)

    def inject_failure(self, asked: str | None) -> None:
        """Raises WireError for a request that is to fail on purpose."""
        if asked is not None:
            failures.check_header(asked)
        failures.roll(self.config.failures, self._failing)

    def keep_alive(self, answer: StreamedAnswer, progress: Callable[[], int], frame: bytes) -> Callable[[], None]:
        return keep_alive(self.loop, answer, progress, self.config.sse_keep_alive_interval_ns, frame)

    def reconfigure(self, changes: dict[str, Any]) -> None:
        """All of `changes` or, with UsageError, none."""
        config = live_changes(self.config, changes)
        repaced = config.pacing != self.config.pacing
        if repaced:
            self._pacings = [make_pacing(config.pacing, chance) for chance in self._chances]
        for engine, pacing in zip(self.engines, self._pacings, strict=True):
            engine.reconfigure(self._engine_config(config), pacing, now_ns=now_ns())
        if repaced:
            self._put_fronts()
        self.sources = SourceMaker(config.generation, self.tokenizer)
        self.config = config
        self.driver.wake()
        log.info("configuration changed: %s", changes)

    def effective_config(self) -> dict[str, Any]:
        return as_json(self.config)

    def close(self) -> None:
        self.driver.close()
        self.planner.close()
        for publisher in self.publishers:
            publisher.close()
        if self.grpc_relay is not None:
            self.grpc_relay.close()

    def _make_ranks(self) -> Ranks:
        """Each rank's steps go to the shared observers and, with KV events, to its own publisher."""
        placer = self.flavour.placer(self.engines)
        shared: tuple[StepObserver, ...] = (self.metrics, HistoryObserver(self.history), placer)
        own: list[tuple[StepObserver, ...]] = [(publisher,) for publisher in self.publishers] or [()] * len(self.engines)
        drivers = [
            EngineDriver(engine, rank, self.loop, self.cork, (*shared, *own[rank])) for rank, engine in enumerate(self.engines)
        ]
        return Ranks(drivers, placer, self.metrics)

    def _engine_config(self, config: ServeConfig) -> Any:
        return self.seams.engine_config(self.flavour.engine_config(config, self.tokenizer))

    def _put_fronts(self) -> None:
        """Each rank gets a front end of its own, or none."""
        for driver, pacing, chance in zip(self.driver.drivers, self._pacings, self._chances, strict=True):
            driver.front(pacing, chance)

    def _make_source(self, *args: Any) -> Any:
        return self.sources(*args)

    def _suffix(self) -> str:
        return f"{self._ids.getrandbits(32):08x}"


class HistoryObserver:
    def __init__(self, history: RequestHistory) -> None:
        self._history = history

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if step.transitions:
            self._history.record(step.transitions)


def open_publishers(config: ServeConfig, flavour: Flavour, loop: asyncio.AbstractEventLoop) -> "tuple[KvPublisher, ...]":
    """One for each rank, or none while KV events are off. Raises UsageError for an endpoint that cannot be had."""
    if not config.kv_events.publishes:
        return ()
    from windtunnel.serve.kv_events import open_publishers as open_all

    return open_all(config.kv_events, flavour.kv_codec(config), config.data_parallel_size, loop)


def load_tokenizer(config: ServeConfig) -> Tokenizer:
    if config.tokenizer is None:
        return BuiltinTokenizer()
    from windtunnel.serve.tokenizers import load_tokenizer as load_folder

    try:
        return load_folder(config.tokenizer)
    except (OSError, ValueError) as error:
        raise UsageError(f"--tokenizer: {error}") from None


def load_recorded(config: ServeConfig, tokenizer: Tokenizer) -> RecordedPlayer | None:
    """The answers of `--responses`. Raises UsageError for a file that cannot be read."""
    file = config.generation.responses_file
    if file is None:
        return None
    try:
        return RecordedPlayer(RecordedResponses(read_lines(Path(file).read_text()), tokenizer))
    except (OSError, ValueError) as error:
        raise UsageError(f"--responses: {error}") from None


def make_env(config: ServeConfig, tokenizer: Tokenizer, new_id: Callable[[], str], stored: ResponseStore) -> ServerEnv:
    loras = {name: Lora(name, path, number) for number, (name, path) in enumerate(config.lora_modules, start=1)}
    env = ServerEnv(
        served_models=config.names,
        tokenizer=tokenizer,
        max_model_len=config.scheduler.max_model_len,
        new_id=new_id,
        now_s=lambda: int(time.time()),
        root=config.model,
        loras=loras,
        version=config.vllm_version,
        pooling_task=config.convert or "embed",
        stored=stored if config.enable_responses_store else None,
        **model_defaults(config, tokenizer),
    )
    same_name = (
        "stream_interval",
        "max_logprobs",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "reasoning_parser",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "return_tokens_as_token_ids",
        "trust_request_chat_template",
        "media_tokens",
        "enable_scale_out",
        "embedding_size",
        "num_labels",
        "data_parallel_size",
    )
    return replace(env, max_body_bytes=config.limits.body_bytes, **{name: getattr(config, name) for name in same_name})


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(config: ServeConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the model's generation config says: more EOS ids, and defaults for fields that a request leaves out."""
    if config.tokenizer is None:
        return {}
    from windtunnel.serve.tokenizers import generation_config

    told = generation_config(config.tokenizer)
    eos = told.get("eos_token_id", [])
    ids = eos if isinstance(eos, list) else [eos]
    sampling = {name: told[name] for name in _SAMPLING_DEFAULTS if told.get(name) is not None}
    if told.get("max_new_tokens"):
        sampling["max_tokens"] = told["max_new_tokens"]
    extra = tuple(token for token in ids if token != tokenizer.eos_token_id)
    return {"extra_eos_token_ids": extra, "default_sampling": sampling}
