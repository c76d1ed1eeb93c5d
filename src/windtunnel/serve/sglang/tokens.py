"""Tokens of an SGLang server: tokenize, detokenize, count (SGLang reference §7.1)."""

from typing import Any

from windtunnel.serve.asgi import JSON
from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.sglang.operator import json_object
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import dumps
from windtunnel.wire.sglang import chat, errors
from windtunnel.wire.vllm import messages as anthropic
from windtunnel.wire.vllm.chat_prompt import render
from windtunnel.wire.vllm.prompts import check_vocabulary


def tokenize(server: Server, call: Call) -> Reply:
    asked = json_object(call)
    given, special = asked.get("prompt"), asked.get("add_special_tokens", True)
    env = server.env
    if isinstance(asked.get("messages"), list):
        request = errors.validated(chat.ChatRequest.model_validate, asked)
        _conversation, planned = render(request.messages, request, env)
        tokens: Any = list(planned.token_ids)
    elif isinstance(given, str):
        tokens = env.tokenizer.encode(given, add_special_tokens=special)
    elif isinstance(given, list) and all(isinstance(text, str) for text in given):
        tokens = [env.tokenizer.encode(text, add_special_tokens=special) for text in given]
    else:
        raise WireError("prompt must be a text or a list of texts", kind=errors.INVALID)
    batch = bool(tokens) and isinstance(tokens[0], list)
    count: Any = [len(one) for one in tokens] if batch else len(tokens)
    return json_reply({"tokens": tokens, "count": count, "max_model_len": env.max_model_len})


def detokenize(server: Server, call: Call) -> Reply:
    asked = json_object(call)
    tokens, skip = asked.get("tokens"), asked.get("skip_special_tokens", True)
    batch = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    lists: Any = tokens if batch else [tokens]
    if not all(isinstance(one, list) and all(isinstance(token, int) and token >= 0 for token in one) for one in lists):
        raise WireError("tokens must be a list of token ids, or a list of such lists", kind=errors.INVALID)
    for one in lists:
        check_vocabulary(one, server.env)
    texts = [server.env.tokenizer.decode(one, skip_special_tokens=skip) for one in lists]
    return json_reply({"text": texts if batch else texts[0]})


def count_tokens(server: Server, call: Call) -> Reply:
    asked = json_object(call)
    body = dumps(asked | {"model": server.env.served_models[0]})
    status, answer = anthropic.count_tokens(body, call.headers, server.env)
    return Reply(answer, status, JSON)
