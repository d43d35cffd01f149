"""HTTPS: from settings to a TLS context, refused at start where files cannot be used. Knows no requests."""

from __future__ import annotations

import ssl

from holdfast.config import ServerConfig
from holdfast.errors import ConfigurationError

TLS_REFUSED = "HF153"


def tls_of(config: ServerConfig) -> ssl.SSLContext | None:
    """None: plain HTTP was asked for."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise _refused("certificate and key", f"{config.ssl_certfile} and {config.ssl_keyfile}", error) from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise _refused("CA certificates", config.ssl_ca_certs or "", error) from error
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError as error:
        raise _refused("ciphers", config.ssl_ciphers or "", error) from error
    return context


def _no_password() -> str:
    """OpenSSL would ask on the terminal."""
    return ""


def _refused(what: str, where: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot serve HTTPS: {what} ({where}) cannot be used: {error.strerror or error}",
        code=TLS_REFUSED,
        needed="readable PEM files, the key without a password",
        fix="--ssl-keyfile FILE --ssl-certfile FILE",
        field="ssl_certfile",
    )
