"""Mooncake's bootstrap server: which engines a prefill has, and where they take pulls (`mooncake_utils.py` of vLLM 0.33.0)."""

from collections.abc import Mapping

from pydantic import ValidationError

from windtunnel.serve import asgi
from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_bytes
from windtunnel.wire.vllm.mooncake import EngineEntry, Registration, error_detail, query_answer

BODY_LIMIT_BYTES = 4096
BODY_TIMEOUT_S = 10.0
WORKERS_LIMIT = 4096
"""vLLM's server has none."""
_JSON = b"application/json"

Answer = tuple[int, bytes]
_OK: Answer = (200, b'{"status":"ok"}')


class Registry:
    """What one bootstrap server knows. Owned by the event loop of whoever runs it."""

    def __init__(self) -> None:
        self._engines: dict[int, tuple[str, dict[int, dict[int, str]]]] = {}
        """Data-parallel rank → engine id, addresses by tensor-parallel and pipeline rank."""
        self._workers = 0

    def register(self, told: Registration) -> Answer:
        """An engine or an address that contradicts a known one is refused; the same again is not."""
        engine_id, addresses = self._engines.get(told.dp_rank, (told.engine_id, {}))
        if engine_id != told.engine_id:
            text = f"Engine ID mismatch for dp_rank={told.dp_rank}: expected {engine_id}, got {told.engine_id}"
            return 400, error_detail(text)
        known = addresses.get(told.tp_rank, {}).get(told.pp_rank)
        if known is None:
            return self._add(told, addresses)
        if known == told.addr:
            return _OK
        place = f"dp_rank={told.dp_rank}, tp_rank={told.tp_rank}, pp_rank={told.pp_rank}"
        text = f"Worker with {place} is already registered at {known}, but still want to register at {told.addr}"
        return 400, error_detail(text)

    def _add(self, told: Registration, addresses: dict[int, dict[int, str]]) -> Answer:
        if self._workers >= WORKERS_LIMIT:
            return 400, error_detail(f"{WORKERS_LIMIT} workers are registered already")
        self._workers += 1
        addresses.setdefault(told.tp_rank, {})[told.pp_rank] = told.addr
        self._engines[told.dp_rank] = told.engine_id, addresses
        return _OK

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
