"""The load report that a client may ask for in a header (ORCA): `endpoint-load-metrics-format: TEXT` or `JSON` (§1.6).

vLLM 0.33 gives it with whole answers of completions and chat only, from the same gauges as `/metrics`.
"""

import json

from windtunnel.wire.metrics import Store

ASKED = "endpoint-load-metrics-format"
FAMILIES = ("completions", "chat")
_NAMES = ("num_requests_waiting", "kv_cache_usage_perc")

Header = tuple[bytes, bytes]


def load_header(asked: str | None, family: str, store: Store) -> list[Header]:
    """The header, or none: not asked for, an unknown format, another family. Values are the first engine's."""
    if asked is None or family not in FAMILIES:
        return []
    values = {name: float(next(iter(store.family(f"vllm:{name}").children.values())).value) for name in _NAMES}
    match asked.lower():
        case "text":
            report = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        case "json":
            report = "JSON " + json.dumps({"named_metrics": values})
        case _:
            return []
    return [(b"endpoint-load-metrics", report.encode())]
