"""Pages about the server: health, load, version, models, tokenizers, metrics, KV-event sources, elastic scaling (§1.1)."""

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from windtunnel.serve.asgi import JSON, Receive, Scope, Send, send_bytes
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, get, json_reply, post, post_text
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import BAD_REQUEST, read_json
from windtunnel.wire.metrics import CONTENT_TYPE, process_metrics, render
from windtunnel.wire.vllm.models import models_body, version_body
from windtunnel.wire.vllm.tokenize import detokenize, tokenize


class MetricsPage:
    """`/metrics`, for any method (§1.1). The process's own series stand in front, as in vLLM.

    Recorded: GET names version 1.0.0 of the format, other methods 0.0.4.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._process = process_metrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type = CONTENT_TYPE if scope["method"] == "GET" else CONTENT_TYPE_PLAIN_0_0_4
        await send_bytes(send, 200, render(self._process, self._server.metrics.store), content_type.encode())


def _health(server: Server, _call: Call) -> Reply:
    """Looks at a flag only: a frozen engine stays healthy (vLLM #39863)."""
    return Reply(status=503 if server.dead else 200)


def show_ready(server: Server, _call: Call) -> Reply:
    """Of llm-d-inference-sim: 503 until `--startup-duration` has passed."""
    return Reply(status=200 if server.ready and not server.dead else 503)


def _load(server: Server, _call: Call) -> Reply:
    """Stays 0 without `--enable-server-load-tracking` (§1.1)."""
    return json_reply({"server_load": server.load if server.config.enable_server_load_tracking else 0})


def _version(server: Server, _call: Call) -> Reply:
    return Reply(version_body(server.env), 200, JSON)


def _models(server: Server, _call: Call) -> Reply:
    return Reply(models_body(server.env), 200, JSON)


def _tokenize(server: Server, call: Call) -> Reply:
    return Reply(tokenize(call.body, call.headers, server.env), 200, JSON)


def _detokenize(server: Server, call: Call) -> Reply:
    return Reply(detokenize(call.body, call.headers, server.env), 200, JSON)


def _kv_event_sources(server: Server, _call: Call) -> Reply:
    return json_reply(server.kv_event_sources)


def _tokenizer_info(server: Server, _call: Call) -> Reply:
    """The tokenizer's class and limits; vLLM adds every option of its tokenizer config."""
    tokenizer = server.env.tokenizer
    return json_reply(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": None,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": server.env.max_model_len,
            "eos_token_id": tokenizer.eos_token_id,
        }
    )


def _is_scaling(_server: Server, _call: Call) -> Reply:
    return json_reply({"is_scaling_elastic_ep": False})


def _scale(server: Server, call: Call) -> Reply:
    """Checks the body as vLLM does; a server without data parallelism over Ray cannot be scaled."""
    body = read_json(call.body, call.headers)
    size = body.get("new_data_parallel_size") if isinstance(body, dict) else None
    if size is None:
        raise WireError("new_data_parallel_size is required", kind=BAD_REQUEST)
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise WireError("new_data_parallel_size must be a positive integer", kind=BAD_REQUEST)
    raise WireError("This server cannot be scaled: its data-parallel ranks are fixed at start.", 501, "NotImplementedError")


ALWAYS: tuple[Rule, ...] = (
    get("/health", _health),
    get("/health/ready", show_ready),
    Rule("/ping", ("GET", "POST"), _health),
    get("/load", _load),
    get("/version", _version),
    get("/v1/models", _models),
    post_text("/tokenize", _tokenize),
    post_text("/detokenize", _detokenize),
    get("/kv_event_sources", _kv_event_sources),
    post("/is_scaling_elastic_ep", _is_scaling),
    post("/scale_elastic_ep", _scale),
)
TOKENIZER_INFO: tuple[Rule, ...] = (get("/tokenizer_info", _tokenizer_info),)
