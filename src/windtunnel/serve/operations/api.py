"""API routes that run nothing in the engine: token counting, rendering, decisions (§1.1 to §1.3)."""

from windtunnel.serve.asgi import JSON
from windtunnel.serve.operations.control import forbidden
from windtunnel.serve.operations.endpoint import Call, Handler, Reply, Rule, post
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import decisions, generate_tokens, messages, render
from windtunnel.wire.vllm.render import Render


def _count_tokens(server: Server, call: Call) -> Reply:
    status, body = messages.count_tokens(call.body, call.headers, server.env)
    return Reply(body, status, JSON)


def _reads(read: Render) -> Handler:
    def handle(server: Server, call: Call) -> Reply:
        return Reply(read(call.body, call.headers, server.env), 200, JSON)

    return handle


def _derender(_server: Server, _call: Call) -> Reply:
    raise WireError("Turning token outputs back into the API form is not simulated", 501, "NotImplementedError")


GENERATION: tuple[Rule, ...] = (
    post("/v1/messages/count_tokens", _count_tokens),
    *(post(path, _reads(decisions.refuse)) for path in decisions.PATHS),
)
SCALE_OUT: tuple[Rule, ...] = (
    *(post(path, _reads(read)) for path, read in render.ROUTES.items()),
    *(post(path, _derender) for path in render.DERENDER_PATHS),
)
SCALE_OUT_OFF: tuple[Rule, ...] = tuple(
    post(path, forbidden) for path in (*render.ROUTES, *render.DERENDER_PATHS, *generate_tokens.paths)
)
