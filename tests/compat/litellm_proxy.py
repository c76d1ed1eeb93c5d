"""The LiteLLM proxy as a router over two workers (clients reference §5)."""

from typing import Any

from tests.compat.modes import Mode, Peer, Setup
from tests.compat.shapes import CHAT, OF, frames
from tests.compat.site import HELLO, Site
from tests.compat.steering import by_vectors
from windtunnel.faults.proxy import Proxy

_WORDS = "--config {config} --host 127.0.0.1 --port {port} --telemetry False"
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
_WORKER = """\
  - model_name: wt-model
    litellm_params: {{{{model: hosted_vllm/wt-model, api_base: {{url{number}}}/v1, api_key: none}}}}
"""
_CONFIG = """\
model_list:
{workers}router_settings: {{{{routing_strategy: simple-shuffle, {settings}}}}}
"""
_CALM = "disable_cooldowns: true"
_OFTEN = f"num_retries: 12, {_CALM}"
"""So often that no request draws the failing one of two workers each time."""
DRAWS = 60
CUT_AFTER = 3
_PACE = ("--itl", "400ms")
"""20 ms of real time, which this proxy can follow."""
_PATIENCE = 4
"""Its start takes 11 s of CPU time, which was 64 s of real time on two cores under a load average of 15; its first answer of an
API took more than 30 s there."""


def _mode(name: str, engine: str, settings: str = _OFTEN) -> Mode:
    workers = "".join(_WORKER.format(number=number) for number in (0, 1))
    config = _CONFIG.format(workers=workers, settings=settings)
    return Mode(name, engine, _WORDS, flags=_PACE, random=True, config=config, environment=_ENVIRONMENT, patience=_PATIENCE)


async def _drawn_again(site: Site) -> str:
    """A retry may draw the worker that has just failed, so some clients see its refusal."""
    told = set()
    for _ in range(DRAWS):
        site.workers[0].failing = 500
        told.add((await site.post(CHAT, HELLO)).status_code)
    return " or ".join(map(str, sorted(told)))


async def _shut_out(site: Site) -> str:
    asked = 1
    while asked:
        for worker in site.workers:
            worker.forget()
            worker.failing = 429
        await site.post(CHAT, HELLO)
        asked = sum(worker.asked for worker in site.workers)
    for worker in site.workers:
        worker.forget()
    answer = await site.post(CHAT, HELLO)
    return f"{answer.status_code}, {'asked' if any(worker.asked for worker in site.workers) else 'no worker is asked'}"


class _Falling(Proxy):
    """Lets the first frames of a stream through and drops the rest, its finish reason and terminator too."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._left = CUT_AFTER

    @property
    def blocked(self) -> Any:
        return self._inner.blocked

    def lane(self, _head: bytes, _tail: bytes) -> None:
        return None

    def write(self, data: bytes) -> None:
        for frame in data.split(b"\n\n")[:-1]:
            if self._left > 0:
                self._inner.write(frame + b"\n\n")
            self._left -= 1


async def _falls_silent(site: Site) -> str:
    """A worker's stream ends as a response does, but without a finish reason and `[DONE]`."""
    for worker in site.workers:
        worker.live.server.seams = worker.live.server.seams.around(sink=_Falling)
    answer = await site.post(CHAT, OF[CHAT].body | {"stream": True})
    told = [choice.get("finish_reason") for frame in frames(answer.text) for choice in frame.get("choices", ())]
    parts = [f"`{reason}`" for reason in told if reason] + ["`[DONE]`"] * answer.text.count("[DONE]")
    return ", ".join(["an error frame"] * ('"error"' in answer.text) + parts) or "neither"


PEER = Peer(
    "litellm",
    "litellm",
    "litellm",
    (_mode("vLLM", "vllm"), _mode("SGLang", "sglang")),
    (
        Setup(
            "`num_retries: 2`, one of two workers answers 500: a client gets",
            _mode("two", "vllm", f"num_retries: 2, {_CALM}"),
            _drawn_again,
        ),
        Setup(
            "`cooldown_time: 60`, both workers have answered 429 and are well again: the next client gets",
            _mode("cool", "vllm", "num_retries: 2, cooldown_time: 60"),
            _shut_out,
        ),
        by_vectors(_mode("vectors", "vllm")),
        Setup("a worker's stream ends cleanly without a finish reason: the client gets", _mode("end", "vllm"), _falls_silent),
    ),
)
