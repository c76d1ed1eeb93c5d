"""Model names: which model a request means, `/v1/models`, `/version` (vLLM reference §1.1, §2.5)."""

from typing import Any

from windtunnel.core.request import Lora
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.http import dumps


def resolve(name: str | None, env: ServerEnv) -> tuple[str, Lora | None]:
    """The name that the answer carries, and the adapter. Aliases answer with the first served name; 404 for others."""
    if not name or name in env.served_models:
        return env.served_models[0], None
    lora = env.loras.get(name)
    if lora is None:
        aliases = ", ".join(env.served_models)
        raise WireError(f"The model `{name}` does not exist. Valid aliases: {aliases}.", 404, "NotFoundError", "model")
    return name, lora


def models_body(env: ServerEnv) -> bytes:
    """`/v1/models`: base names first, then adapters; `created` is the time of the call."""
    cards = [_card(name, env.model_root, None, env.max_model_len, env) for name in env.served_models]
    cards += [_card(lora.name, lora.path, env.served_models[0], None, env) for lora in env.loras.values()]
    return dumps({"object": "list", "data": cards})


def version_body(env: ServerEnv) -> bytes:
    return dumps({"version": env.profile.version})


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, env: ServerEnv) -> dict[str, Any]:
    now_s = env.now_s()
    return {
        "id": name,
        "object": "model",
        "created": now_s,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [_permission(env.new_id(), now_s)],
    }


def _permission(hex_id: str, now_s: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{hex_id}",
        "object": "model_permission",
        "created": now_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
