"""Routers of other projects as `windtunnel up` starts them: what each is told in place of ours (clients reference §3, §4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from windtunnel.serve.up.plan import Pairing, Role, RouterKind


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a package, named as it is. Each takes `--worker-urls`, and for a pair `--prefill` and `--decode`."""

    launch: tuple[str, ...]
    pairs: Mapping[Pairing, tuple[str, ...]]
    """The words that make it a router of such pairs; one that is not here is none for it."""
    registers: frozenset[Pairing] = frozenset()
    """Pairs whose workers it takes by `POST /workers` only, after its start."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A server as a router is told of it."""

    url: str
    role: Role
    bootstrap_port: int | None = None
    connector: str = "NixlConnector"
    """Of a vLLM pair."""


_SMG_VLLM = ("--pd-disaggregation", "--backend", "vllm", "--enable-igw")
PROGRAMS: Mapping[RouterKind, Program] = MappingProxyType(
    {
        "sglang-router": Program(("launch",), {"sglang": ("--pd-disaggregation",)}),
        "smg": Program(
            ("launch",),
            {"sglang": ("--pd-disaggregation",), "vllm": _SMG_VLLM, "vllm-mooncake": _SMG_VLLM},
            registers=frozenset({"vllm", "vllm-mooncake"}),
        ),
        "vllm-router": Program(
            (),
            {
                "vllm": ("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
                "vllm-mooncake": ("--vllm-pd-disaggregation", "--kv-connector", "mooncake"),
                "sglang": ("--mini-lb", "--vllm-pd-disaggregation"),
            },
        ),
    }
)
_KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def registration(worker: Worker) -> dict[str, Any]:
    """smg's `POST /workers` of a vLLM worker (clients §4.1). With Mooncake it tells decodes the prefill's engine id."""
    told = {
        "url": worker.url,
        "worker_type": worker.role,
        "runtime_type": "vllm",
        "kv_connector": worker.connector,
        "kv_role": _KV_ROLES[worker.role],
        "kv_engine_id": f"{worker.role}-{worker.url.rpartition(':')[2]}",
    }
    return told if worker.bootstrap_port is None else told | {"bootstrap_port": worker.bootstrap_port}
