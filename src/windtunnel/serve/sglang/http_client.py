"""Small HTTP questions of P/D workers to bootstrap servers."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import httpx

from windtunnel.core.shown import shown

ANSWER_LIMIT_BYTES = 4 * 1024 * 1024


class NoAnswer(Exception):
    """No answer, a wrong status, or a body that is not what is due."""


class HttpAsker:
    """Owns a connection pool."""

    def __init__(self) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=64, max_keepalive_connections=16))

    async def ask(self, method: str, url: str, patience: httpx.Timeout, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of a 200. Raises NoAnswer."""
        try:
            answer = await self._client.request(method, url, json=body, timeout=patience)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise NoAnswer(f"{method} {shown(url)}: {type(error).__name__} {shown(str(error))}") from error
        if answer.status_code != 200:
            raise NoAnswer(f"{method} {url}: status {answer.status_code}: {answer.text[:200]}")
        if len(answer.content) > ANSWER_LIMIT_BYTES:
            raise NoAnswer(f"{method} {url}: over {ANSWER_LIMIT_BYTES} bytes")
        return answer.content

    async def ask_json(self, method: str, url: str, patience: httpx.Timeout, body: Mapping[str, Any] | None = None) -> Any:
        """As `ask`, for a JSON body."""
        content = await self.ask(method, url, patience, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise NoAnswer(f"{method} {url}: not JSON: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()
