"""Adapters and weights of an SGLang server, in the small: nothing is loaded (SGLang reference §7.6)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.core.request import Lora
from windtunnel.serve.clock import now_ns
from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.sglang.operator import json_object
from windtunnel.serve.state import Server


def _lora_reply(server: Server, problem: str | None) -> Reply:
    loaded = {lora.name: lora.path for lora in server.env.loras.values()}
    told = {"success": problem is None, "error_message": problem or "", "loaded_adapters": loaded}
    return json_reply(told, 200 if problem is None else 400)


def load_lora(server: Server, call: Call) -> Reply:
    asked = json_object(call)
    name, path = asked.get("lora_name"), asked.get("lora_path", "")
    if not isinstance(name, str) or not name or not isinstance(path, str):
        return _lora_reply(server, "lora_name and lora_path must be texts")
    if name in server.env.loras:
        return _lora_reply(server, f"LoRA adapter {name!r} is already loaded.")
    if len(server.env.loras) >= server.config.limits.adapters:
        return _lora_reply(server, f"The server already holds {len(server.env.loras)} adapters: unload one first.")
    lora = Lora(name, path, server.operator.next_lora_id())
    server.env = replace(server.env, loras={**server.env.loras, name: lora})
    return _lora_reply(server, None)


def unload_lora(server: Server, call: Call) -> Reply:
    name = json_object(call).get("lora_name")
    if not isinstance(name, str) or name not in server.env.loras:
        return _lora_reply(server, f"LoRA adapter {name!r} is not loaded.")
    rest = {known: lora for known, lora in server.env.loras.items() if known != name}
    server.env = replace(server.env, loras=rest)
    return _lora_reply(server, None)


def update_weights(server: Server, call: Call) -> Reply:
    """Nothing is loaded; the version moves when one is named, and the cache is flushed unless told otherwise."""
    asked = json_object(call)
    version = asked.get("weight_version")
    if isinstance(version, str) and version:
        server.env = _with_weights(server, version)
    paused = sum(len(engine.sequences) for engine in server.engines)
    if asked.get("flush_cache", True):
        for engine in server.engines:
            engine.flush_cache(now_ns())
    server.driver.wake()
    return json_reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused})


def update_weight_version(server: Server, call: Call) -> Reply:
    version = json_object(call).get("new_version")
    if not isinstance(version, str) or not version:
        return json_reply({"success": False, "message": "new_version must be a text"}, 400)
    server.env = _with_weights(server, version)
    told = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    return json_reply(told)


def _with_weights(server: Server, version: str) -> Any:
    changed: Mapping[str, Any] = {"weight_version": version}
    return replace(server.env, **changed)


def done(_server: Server, _call: Call) -> Reply:
    return json_reply({"success": True, "message": "Success."})
