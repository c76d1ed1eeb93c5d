"""The routes that generate nothing, by subject. One table: path, methods, endpoint."""

from windtunnel.serve.operations import adapters, api, control, debug, docs, engine_info, pages
from windtunnel.serve.operations.endpoint import Row, Rule, Simple
from windtunnel.serve.operations.pages import MetricsPage
from windtunnel.serve.responses import CancelRoute, RetrieveRoute
from windtunnel.serve.state import Server
from windtunnel.wire.vllm import families

__all__ = ["table"]


def table(server: Server) -> list[Row]:
    """All rows of a vLLM server with this configuration."""
    config = server.config
    rows: list[Row] = [_row(server, rule) for rule in rules(server)]
    rows.append(("/metrics", None, MetricsPage(server)))
    if config.runner == "generate":
        rows.append(("/v1/responses/{response_id}", ["GET"], RetrieveRoute(server)))
        rows.append(("/v1/responses/{response_id}/cancel", ["POST"], CancelRoute(server)))
    if not config.disable_fastapi_docs:
        engine_paths = [path for family in families(config.runner, config.convert, config.num_labels) for path in family.paths]
        rows += [_row(server, rule) for rule in docs.rules([*engine_paths, *(row[0] for row in rows)])]
    return rows


def _row(server: Server, rule: Rule) -> Row:
    return rule.path, rule.methods, Simple(server, rule)


def rules(server: Server) -> list[Rule]:
    """Which groups of routes exist (vLLM reference §1.1, §1.3, §1.4)."""
    config = server.config
    groups = [
        (pages.ALWAYS, True),
        (debug.ALWAYS, True),
        (control.SCALE_OUT if config.enable_scale_out else control.SCALE_OUT_OFF, True),
        (api.GENERATION, config.runner == "generate"),
        (pages.TOKENIZER_INFO, config.enable_tokenizer_info_endpoint),
        (engine_info.PROFILER, config.profiler_config is not None),
        (adapters.RUNTIME_LORA, config.runtime_lora),
        (control.DEVELOPER, config.dev_mode),
        (engine_info.DEVELOPER, config.dev_mode),
    ]
    return [rule for group, wanted in groups if wanted for rule in group]
