"""API routes that run nothing in the engine: token counting, decisions (§1.1, §1.2)."""

from windtunnel.serve.asgi import JSON
from windtunnel.serve.operations.control import rendering
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, post, post_text
from windtunnel.serve.state import Server
from windtunnel.wire.vllm import decisions, messages


def _count_tokens(server: Server, call: Call) -> Reply:
    status, body = messages.count_tokens(call.body, call.headers, server.env)
    return Reply(body, status, JSON)


GENERATION: tuple[Rule, ...] = (
    post_text("/v1/messages/count_tokens", _count_tokens),
    *(post(path, rendering(decisions.refuse)) for path in decisions.PATHS),
)
