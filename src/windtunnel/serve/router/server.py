"""The router's process."""

import asyncio
import contextlib
import logging

import uvicorn

from windtunnel.serve.router.app import RouterApp
from windtunnel.serve.router.config import RouterConfig
from windtunnel.serve.signals import handled_by

log = logging.getLogger("windtunnel.router")
_LAST_WRITES_S = 1


def run(config: RouterConfig) -> None:
    """Route until a signal. Blocks."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(route(config))


def uvicorn_config(config: RouterConfig, app: RouterApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        limit_concurrency=config.connections,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        timeout_graceful_shutdown=_LAST_WRITES_S,
    )


async def route(config: RouterConfig) -> None:
    app = RouterApp(config)
    log.info("routing to %s", ", ".join(app.urls))
    try:
        await _Router(uvicorn_config(config, app)).serve()
    finally:
        await app.close()


class _Router(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return handled_by(self.handle_exit)
