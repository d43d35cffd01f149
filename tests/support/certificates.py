"""A private key and a certificate of its own for 127.0.0.1, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deadlines import PATIENCE_S


def self_signed(folder: Path) -> tuple[str, str]:
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return key, cert
