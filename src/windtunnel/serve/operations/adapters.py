"""Adapters that come and go at run time; only with VLLM_ALLOW_RUNTIME_LORA_UPDATING (§1.1, recorded in variant B)."""

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from windtunnel.core.request import Lora
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, post
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import read_model

_INVALID = "InvalidUserInput"


class LoadAdapter(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(BaseModel):
    lora_name: str
    lora_int_id: int | None = None


def _load(server: Server, call: Call) -> Reply:
    asked = read_model(LoadAdapter, call.body, call.headers)
    name, path = asked.lora_name, asked.lora_path
    loras = server.env.loras
    if not name or not path:
        raise WireError("Both 'lora_name' and 'lora_path' must be provided.", kind=_INVALID)
    if name in loras and not asked.load_inplace:
        hint = "If you want to load the adapter in place, set 'load_inplace' to True."
        raise WireError(f"The lora adapter '{name}' has already been loaded. {hint}", kind=_INVALID)
    if not _exists(server, path):
        raise WireError(f"Loading lora {name} failed: No adapter found for {path}", 404, "NotFoundError")
    if len(loras) >= server.config.limits.adapters:
        raise WireError(f"The server already holds {len(loras)} adapters: unload one first.", kind=_INVALID)
    lora = Lora(name, path, server.operator.next_lora_id())
    server.env = replace(server.env, loras={**loras, name: lora})
    return Reply(f"Success: LoRA adapter '{name}' added successfully.".encode())


def _exists(server: Server, path: str) -> bool:
    """A simulated adapter needs no files: a path that is known, exists, or has a slash or a scheme in it."""
    known = {lora.path for lora in server.env.loras.values()}
    return path in known or "/" in path or Path(path).exists()


def _unload(server: Server, call: Call) -> Reply:
    name = read_model(UnloadAdapter, call.body, call.headers).lora_name
    if not name:
        raise WireError("'lora_name' needs to be provided to unload a LoRA adapter.", kind=_INVALID)
    if name not in server.env.loras:
        raise WireError(f"The lora adapter '{name}' cannot be found.", 404, "NotFoundError")
    rest = {known: lora for known, lora in server.env.loras.items() if known != name}
    server.env = replace(server.env, loras=rest)
    return Reply(f"Success: LoRA adapter '{name}' removed successfully.".encode())


RUNTIME_LORA: tuple[Rule, ...] = (post("/v1/load_lora_adapter", _load), post("/v1/unload_lora_adapter", _unload))
