"""Small HTTP questions to bootstrap servers."""

import asyncio
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
        return await ask(self._client, method, url, patience, body)

    async def ask_json(self, method: str, url: str, patience: httpx.Timeout, body: Mapping[str, Any] | None = None) -> Any:
        """As `ask`, for a JSON body."""
        content = await self.ask(method, url, patience, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise NoAnswer(f"{method} {url}: not JSON: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


async def ask(
    client: httpx.AsyncClient, method: str, url: str, patience: httpx.Timeout, body: Mapping[str, Any] | None = None
) -> bytes:
    """The body of a 200. Raises NoAnswer, also for one that takes longer than connecting and one read may together."""
    whole_s = (patience.connect or 0) + (patience.read or 0)
    try:
        async with asyncio.timeout(whole_s), client.stream(method, url, json=body, timeout=patience) as answer:
            content = await _limited(answer)
    except TimeoutError as error:
        raise NoAnswer(f"{method} {shown(url)}: TimeoutError no whole answer within {whole_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise NoAnswer(f"{method} {shown(url)}: {type(error).__name__} {shown(str(error))}") from error
    if answer.status_code != 200:
        raise NoAnswer(f"{method} {url}: status {answer.status_code}: {content[:200].decode(errors='replace')}")
    if len(content) > ANSWER_LIMIT_BYTES:
        raise NoAnswer(f"{method} {url}: over {ANSWER_LIMIT_BYTES} bytes")
    return content


async def _limited(answer: httpx.Response) -> bytes:
    """The body, and not much more than the limit of one that is longer: the URL may be a stranger's."""
    content = bytearray()
    async for piece in answer.aiter_bytes(65536):
        content += piece
        if len(content) > ANSWER_LIMIT_BYTES:
            break
    return bytes(content)
