"""Mooncake's bootstrap server: which engines a prefill has, and where they take pulls (`mooncake_utils.py` of vLLM 0.33.0)."""

from collections.abc import Mapping

from pydantic import ValidationError

from windtunnel.serve import asgi
from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_bytes
from windtunnel.wire.vllm.mooncake import RANKS_LIMIT, EngineEntry, Registration, error_detail, query_answer

BODY_LIMIT_BYTES = 4096
BODY_TIMEOUT_S = 10.0
_JSON = b"application/json"

Answer = tuple[int, bytes]
_OK: Answer = (200, b'{"status":"ok"}')


class Registry:
    """What one bootstrap server knows. Owned by the event loop of whoever runs it."""

    def __init__(self) -> None:
        self._engines: dict[int, tuple[str, dict[int, dict[int, str]]]] = {}
        """Data-parallel rank → engine id, addresses by tensor-parallel and pipeline rank."""

    def register(self, told: Registration) -> Answer:
        """An engine or an address that contradicts a known one is refused; the same again is not."""
        if not self._has_room(told):
            return 400, error_detail(f"{RANKS_LIMIT} workers are registered already")
        engine_id, addresses = self._engines.setdefault(told.dp_rank, (told.engine_id, {}))
        if engine_id != told.engine_id:
            text = f"Engine ID mismatch for dp_rank={told.dp_rank}: expected {engine_id}, got {told.engine_id}"
            return 400, error_detail(text)
        stages = addresses.setdefault(told.tp_rank, {})
        known = stages.setdefault(told.pp_rank, told.addr)
        if known == told.addr:
            return _OK
        place = f"dp_rank={told.dp_rank}, tp_rank={told.tp_rank}, pp_rank={told.pp_rank}"
        text = f"Worker with {place} is already registered at {known}, but still want to register at {told.addr}"
        return 400, error_detail(text)

    def _has_room(self, told: Registration) -> bool:
        """For one that is not there yet; all engines together have so many."""
        ranks = [stages for _engine_id, addresses in self._engines.values() for stages in addresses.values()]
        known = told.dp_rank in self._engines and told.pp_rank in self._engines[told.dp_rank][1].get(told.tp_rank, {})
        return known or sum(map(len, ranks)) < RANKS_LIMIT

    def query(self) -> Answer:
        return 200, query_answer({rank: EngineEntry(*entry) for rank, entry in self._engines.items()})


def build(registry: Registry) -> Endpoint:
    """The ASGI application."""

    async def register(_scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await asgi.read_body(receive, BODY_LIMIT_BYTES, BODY_TIMEOUT_S)
            answer = registry.register(Registration.model_validate_json(body))
        except ValidationError as error:
            answer = 422, error_detail(error.errors(include_url=False, include_context=False, include_input=False))
        except asgi.BodyTooLarge:
            answer = 413, error_detail(f"The body is over {BODY_LIMIT_BYTES} bytes")
        except asgi.BodyTimeout:
            answer = 408, error_detail("The body did not arrive in time")
        except asgi.ClientGone:
            return
        await send_bytes(send, *answer, _JSON)

    async def query(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send_bytes(send, *registry.query(), _JSON)

    routes: Mapping[str, Mapping[str, Endpoint]] = {"/register": {"POST": register}, "/query": {"GET": query}}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods = routes.get(scope["path"])
        endpoint = None if methods is None else methods.get(scope["method"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            status, text = (404, "Not Found") if methods is None else (405, "Method Not Allowed")
            await send_bytes(send, status, error_detail(text), _JSON)

    return app
