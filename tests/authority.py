"""Certificates for tests, made by the openssl command: a CA, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command: no certificates here")
_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True)
class Signed:
    """Files of one node."""

    certificate_file: Path
    key_file: Path
    ca_file: Path

    def toml(self, more: str = "") -> str:
        """`[tls]` of a configuration."""
        keys = ("certificate_file", "key_file", "ca_file")
        return "\n".join(["[tls]", *(f'{key} = "{getattr(self, key)}"' for key in keys), more, ""])


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._name = name
        self.ca_file = directory / f"{name}.crt"
        days = ["-days", "2", "-subj", f"/CN={name}"]
        self._openssl("req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", *days)

    def sign(self, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1", *, days: int = 1, subject: str = "") -> Signed:
        """A certificate for a node, for both ends of a connection. `days` below 0: it has expired."""
        at = self._directory
        self._openssl(
            "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject or f"/CN={name}"
        )
        (at / f"{name}.ext").write_text(f"subjectAltName={hosts}\n")
        valid = ["-days", str(days)]
        if days < 0:
            valid = ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]
        ca = ["-CA", f"{self._name}.crt", "-CAkey", f"{self._name}.key", "-CAcreateserial"]
        made = ["-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext"]
        if days < 0:
            self._expired(name, valid)
        else:
            self._openssl("x509", "-req", *ca, *made, *valid)
        (at / f"{name}.key").chmod(0o600)
        return Signed(at / f"{name}.crt", at / f"{name}.key", self.ca_file)

    def _expired(self, name: str, valid: list[str]) -> None:
        """By `openssl ca`, which takes dates in every version."""
        at = self._directory
        (at / "index.txt").write_text("")
        (at / "ca.cnf").write_text(
            f"[ca]\ndefault_ca = d\n[d]\ndatabase = {at}/index.txt\nnew_certs_dir = {at}\nrand_serial = yes\n"
            "default_md = sha256\npolicy = p\n[p]\ncommonName = supplied\n"
        )
        dates = ["-startdate", valid[1], "-enddate", valid[3]]
        ca = ["-cert", f"{self._name}.crt", "-keyfile", f"{self._name}.key"]
        files = ["-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext"]
        self._openssl("ca", "-batch", "-notext", "-config", "ca.cnf", *ca, *files, *dates)

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self._directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
