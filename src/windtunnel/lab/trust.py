"""Whom the lab trusts over TLS, and as whom it comes. Usual: the machine's store (or `SSL_CERT_FILE`), and as nobody."""

import ssl
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Trust:
    """Paths are of PEM files; a certificate's file may have its key, too."""

    ca: str | None = None
    """Vouches for servers in place of the machine's store."""
    insecure: bool = False
    """Takes every server for what it says it is."""
    client_cert: str | None = None
    client_key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError is one) for a file that cannot be used."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.client_cert is not None:
            context.load_cert_chain(self.client_cert, self.client_key, password=lambda: "")
        return context

    def pinned(self, pem: str) -> ssl.SSLContext:
        """Takes the server that has this very certificate, by whatever name."""
        context = replace(self, ca=None, insecure=True).context()
        context.verify_mode, context.verify_flags = ssl.CERT_REQUIRED, ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=pem)
        return context

    def grpc_files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Root certificates, private key and certificate chain, as gRPC's credentials take them."""
        paths = (self.ca, self.client_key or self.client_cert, self.client_cert)
        root, key, chain = (Path(path).read_bytes() if path else None for path in paths)
        return root, key, chain

    @property
    def missing(self) -> str:
        """What to try when a server ends a connection before it answers; nothing where a certificate was shown."""
        hint = "; does it want a certificate of its clients? (--client-cert, in an experiment file tls.client_cert)"
        return "" if self.client_cert else hint

    def for_others(self) -> "Trust":
        """As towards hosts that are not the target's: they do not get to know who comes."""
        return replace(self, client_cert=None, client_key=None)


USUAL = Trust()


def check_trust(trust: Trust) -> Trust:
    """Raises ValueError that begins with the name of the setting."""
    if trust.client_key is not None and trust.client_cert is None:
        raise ValueError("client_key: goes with client_cert, which is not given")
    if trust.insecure and trust.ca is not None:
        raise ValueError("insecure: verifies nobody, so ca has no use; leave one of them out")
    for name, only in (("ca", replace(trust.for_others(), insecure=False)), ("client_cert", replace(trust, ca=None))):
        try:
            only.context()
        except ssl.SSLError:
            form = (
                "certificates"
                if name == "ca"
                else "a certificate and its key without a password (client_key, or the same file)"
            )
            raise ValueError(f"{name}: {getattr(trust, name)} is not a PEM file of {form}") from None
        except OSError as error:
            raise ValueError(f"{name}: {getattr(trust, name)}: {error.strerror}") from None
    return trust
