"""How to a gRPC worker: the credentials of its channels, and the name by which its certificate is asked for.

gRPC's library verifies every server. An insecure door therefore looks first which certificate the worker shows, and takes that
one for its root, under a name that stands in it. So a certificate that has expired, or that names nobody, cannot be taken.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from windtunnel.lab.connection import TLS, Origin

LOOK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GrpcDoor:
    """`credentials`: None without TLS."""

    origin: Origin
    credentials: grpc.ChannelCredentials | None
    name: str

    def channel(self, options: list[tuple[str, int]], address: str | None = None) -> grpc.aio.Channel:
        """To another address than the worker's where one is given, a relay's."""
        address = address or self.origin.authority
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        named: list[tuple[str, Any]] = [*options, ("grpc.ssl_target_name_override", self.name)]
        return grpc.aio.secure_channel(address, self.credentials, options=named)


async def find_door(origin: Origin) -> GrpcDoor:
    """Raises OSError for a worker that shows no certificate that could be taken."""
    if origin.scheme not in TLS:
        return GrpcDoor(origin, None, "")
    root, key, chain = origin.trust.grpc_files()
    name = origin.host
    if origin.trust.insecure:
        root, name = await _shown(origin)
    return GrpcDoor(origin, grpc.ssl_channel_credentials(root, key, chain), name)


async def _shown(origin: Origin) -> tuple[bytes, str]:
    """The worker's certificate, and a name in it."""
    seen = await _handshake(origin, origin.trust.context())
    pem = ssl.DER_cert_to_PEM_cert(seen.getpeercert(binary_form=True) or b"")
    known = await _handshake(origin, origin.trust.pinned(pem))
    name = _name(known.getpeercert() or {})
    if name is None:
        raise OSError("insecure: the worker's certificate names nobody, and gRPC's library takes none without a name")
    return pem.encode(), name


async def _handshake(origin: Origin, context: ssl.SSLContext) -> ssl.SSLObject:
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(LOOK_TIMEOUT_S):
        _, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
    seen: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return seen


def _name(certificate: Mapping[str, Any]) -> str | None:
    """One that the certificate is valid for; of a wildcard any, since it is sent as the name of the server that is wanted."""
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return next((name.replace("*", "any") for name in [*others, *common]), None)
