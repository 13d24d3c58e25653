"""REST with tokens, roles and TLS."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from controller_harness import ROOT, Controller
from fbrates.loader import InvalidConfig
from fbrates.rest import RequestError
from fbrates.tokens import Role, Tokens, check

FILE = """
tenants:
  red:
    rate: 100Mbps
    vms: {a: {port: vm-a, rate: 30Mbps, destinations: [{to: 10.0.0.9, rate: 5Mbps}]}}
  blue: {vms: {b: {port: vm-b, rate: 4Mbps}}}
"""
Start = Callable[..., Controller]


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
tokens:
  - {{name: ops, sha256: {digest("secret-of-ops")}, role: admin}}
  - {{name: red, sha256: {digest("secret-of-red")}, role: tenant, tenant: red}}
"""


def load(tmp_path: Path, text: str) -> Tokens:
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    return Tokens.load(str(file))


def test_who_asks(tmp_path: Path) -> None:
    tokens = load(tmp_path, TOKENS)
    assert tokens.role({"Authorization": "Bearer secret-of-ops"}) == Role("ops")
    assert tokens.role({"Authorization": "bearer  secret-of-red"}) == Role("red", "red")
    for bad in ("", "Bearer", "Bearer ", "Bearer secret", "Basic secret-of-ops", "Bearer \xff",
                f"Bearer {digest('secret-of-ops')}"):
        with pytest.raises(RequestError) as caught:
            tokens.role({"Authorization": bad})
        assert caught.value.response.status == 401
        assert caught.value.response.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("old", "new"),
    [("role: admin", "role: king"), ("role: admin", "role: tenant"), (", tenant: red", ""),
     ("name: ops", "name: 'o ps'"), ("role: admin", "role: admin, more: 1"),
     (digest("secret-of-ops"), "secret-of-ops"), ("tokens:", "token:"), ("tokens:", "tokens: [")],
)
def test_a_file_of_tokens_that_is_wrong(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(tmp_path, TOKENS.replace(old, new, 1))
    # Not what was put there by mistake.
    assert "secret-of-ops" not in str(caught.value)


def test_what_a_tenant_may_ask() -> None:
    role = Role("red", "red")
    for method, path in (("GET", "/v1/tenants/red"), ("GET", "/v1/tenants/red/vms/a/share"),
                         ("PUT", "/v1/tenants/red/vms/a/rate"), ("PUT", "/v1/tenants/red/rate")):
        check(role, method, path)
        check(Role("ops"), method, path)
    for method, path in (
        ("GET", "/v1/tenants"), ("GET", "/v1/tenants/blue"), ("PUT", "/v1/tenants/blue/rate"),
        ("GET", "/v1/tenants/reddish"), ("PUT", "/v1/tenants/red/vms/a/share"),
        ("POST", "/v1/apply"), ("GET", "/v1/export"), ("GET", "/metrics"), ("GET", "/v1/status"),
        ("DELETE", "/v1/tenants/red/vms/a/rate"), ("GET", "/v1/history"), ("GET", ""),
        ("GET", "/v1/changes/1"), ("PUT", "/v1/tenants/red"), ("PUT", "/v1/tenants/red/vms/rate"),
        ("PUT", "/v1/tenants/red/vms/a"), ("DELETE", "/v1/tenants/red/vms/a"),
        ("PUT", "/v1/tenants/red/destinations/rate"),
        ("PUT", "/v1/tenants/red/vms/a/destinations/rate"),
        ("PUT", "/v1/tenants/red/vms/a/nothing/rate"),
    ):
        with pytest.raises(RequestError) as caught:
            check(role, method, path)
        assert caught.value.response.status == 403


def test_over_tls(ovs_tree: Path, controller: Start, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", str(key), "-out", str(cert), "-subj", "/CN=fb", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    file = tmp_path / "tokens.yaml"
    file.write_text(TOKENS)
    running = controller(FILE, "--rest-tls-key", str(key), "--rest-tls-cert", str(cert),
                         "--rest-tokens", str(file))
    url = running.url.replace("http:", "https:")

    def ask(method: str, path: str, token: str | None, body: object = None) -> requests.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return requests.request(method, url + path, json=body, headers=headers, verify=str(cert),
                                timeout=20)

    for path in ("/v1/status", "/metrics", "/v1/tenants/red", "/v1/nothing"):
        assert ask("GET", path, None).status_code == 401
        assert ask("GET", path, "wrong").status_code == 401
    assert ask("GET", "/v1/status", "secret-of-ops").status_code == 200
    assert ask("GET", "/metrics", "secret-of-ops").status_code == 200
    assert ask("GET", "/v1/tenants/red", "secret-of-red").json()["vms"].keys() == {"a"}
    assert ask("GET", "/v1/tenants/blue", "secret-of-red").status_code == 403
    # (There is no switch: 503 is what is stored and not in force.)
    vm = "/v1/tenants/red/vms/a/rate"
    assert ask("PUT", vm, "secret-of-red", {"rate": "20Mbps"}).status_code == 503
    assert ask("PUT", vm, "secret-of-red", {"rate": "30Mbps"}).status_code == 503
    for more in ("31Mbps", "unlimited"):
        assert ask("PUT", vm, "secret-of-red", {"rate": more}).status_code == 403
    assert ask("PUT", vm, "secret-of-ops", {"rate": "31Mbps"}).status_code == 503
    assert ask("GET", vm, "secret-of-ops").json()["rate"] == "31Mbps"
    who = [item["who"] for item in ask("GET", "/v1/history", "secret-of-ops").json()["history"]]
    assert who[1:] == ["red by REST from 127.0.0.1"] * 2 + ["ops by REST from 127.0.0.1"]
    # Who does not speak TLS disturbs nobody.
    with pytest.raises(requests.RequestException):
        requests.get(running.url + "/v1/status", timeout=5)

    token = tmp_path / "token"
    token.write_text("secret-of-ops\n")
    ctl = [str(ROOT / "utilities" / "flowbundler-ctl"), "show", "red"]
    env = {**os.environ, "FLOWBUNDLER_URL": url}
    done = subprocess.run(ctl, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "certificate" in done.stderr
    env |= {"FLOWBUNDLER_CA": str(cert)}
    done = subprocess.run(ctl, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "a token is needed" in done.stderr
    env |= {"FLOWBUNDLER_TOKEN_FILE": str(token)}
    done = subprocess.run(ctl, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and "31Mbps" in done.stdout, done.stderr
    assert "secret" not in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
