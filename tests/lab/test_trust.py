"""TLS with certificates of one's own, on both sides, over real sockets."""

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from tests.lab.conftest import EXPERIMENT, make_certificate
from tests.lab.fake_doors import grpc_door
from tests.lab.fake_server import FakeServer
from tests.lab.test_findings import PLAN
from tests.lab.test_storm_command import SMALL, storm
from tests.lab.test_targets import over_tls
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.lab.connection import Connection, ConnectionCut, How, Origin, fetch
from windtunnel.lab.experiment import Options, run_experiment
from windtunnel.lab.experiment_file import Environment, ExperimentError, parse
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Role
from windtunnel.lab.record import End
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import TargetError, find_model, make_target
from windtunnel.lab.trust import USUAL, Trust, check_trust


@pytest.mark.parametrize("clients", ["1", "2"])
async def test_a_ca_and_a_client_certificate(certificate: Path, clients: str) -> None:
    pem = str(certificate)
    async with over_tls(certificate, clients=certificate) as url:
        code, out, err = await storm(url, *SMALL, "--ca", pem, "--client-cert", pem, "--clients", clients, "--json")
    assert code == 0, err
    assert json.loads(out)["victims"]["left"] == 4
    assert "PRIVATE KEY" not in out + err


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_comes_without_a_certificate_is_not_let_in(
    certificate: Path, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS 1.3 the server says so after the handshake, and closes. What the client meets first is the kernel's: the alert,
    the end, a reset, or a broken pipe as it writes. So it is the server that tells that nobody came in.
    """
    served = Mock()
    monkeypatch.setattr(FakeServer, "serve", served)
    async with over_tls(certificate, clients=certificate, version=version) as url:
        code, _, err = await storm(url, *SMALL, "--ca", str(certificate))
    assert code == 2 and err.startswith(f"windtunnel: {url}/v1/models: ")
    assert "does it want a certificate of its clients? (--client-cert" in err
    assert not served.called


@pytest.mark.parametrize("how", [How.FIN, How.RST])
async def test_a_server_that_ends_the_connection_unasked_may_want_a_certificate(certificate: Path, how: How) -> None:
    """A TLS 1.3 server whose alert is lost. A client that has shown one, or that came by plain TCP, is asked nothing."""

    def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        Connection(reader, writer).leave(how)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    pem = str(certificate)
    for tls, trust, asked in (
        (context, Trust(ca=pem), True),
        (context, Trust(ca=pem, client_cert=pem), False),
        (None, USUAL, False),
    ):
        async with await asyncio.start_server(end, "127.0.0.1", 0, ssl=tls) as server:
            origin = Origin("https" if tls else "http", "127.0.0.1", server.sockets[0].getsockname()[1], trust=trust)
            with pytest.raises((ConnectionCut, OSError)) as told:
                await fetch(origin, "GET", "/", {})
        assert ("--client-cert" in str(told.value)) is asked


async def test_a_target_can_be_taken_for_what_it_says(certificate: Path) -> None:
    async with over_tls(certificate) as url:
        code, out, err = await storm(url, *SMALL, "--insecure", "--json")
    assert code == 0, err
    assert json.loads(out)["victims"]["left"] == 4


def test_other_hosts_do_not_get_to_know_who_comes(certificate: Path) -> None:
    pem = str(certificate)
    trust = Trust(ca=pem, client_cert=pem)
    urls = ["https://gateway.example:1/metrics", "https://worker.example/metrics"]
    target = make_target("https://gateway.example", "m", metrics_urls=urls, trust=trust)
    assert target.origin.trust == target.plain.trust == trust
    assert [url.origin.trust for url in target.metrics] == [trust, Trust(ca=pem)]


async def test_grpc_with_certificates_on_both_sides(certificate: Path) -> None:
    pem = certificate.read_bytes()  # noqa: ASYNC240  # before anything runs
    tls = grpc.ssl_server_credentials([(pem, pem)], pem, require_client_auth=True)
    fake = FakeServer()
    metrics = [f"http://127.0.0.1:{await fake.start()}/metrics"]
    plan = replace(PLAN, how=(How.RST_STREAM, How.RST))
    try:
        async with grpc_door(fake, tls) as (port, _):
            url, trust = f"grpcs://127.0.0.1:{port}", Trust(ca=str(certificate), client_cert=str(certificate))
            result = await run_storm(make_target(url, "fake", metrics_urls=metrics, trust=trust), plan)
            with pytest.raises(TargetError, match=r"does not answer a plain stream.*does it want a certificate of its clients"):
                await run_storm(make_target(url, "fake", metrics_urls=metrics, trust=replace(trust, client_cert=None)), plan)
    finally:
        await fake.stop()
    assert find(result) == ()
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}


def asking_everybody(pem: Path) -> grpc.ServerCredentials:
    """A worker with this certificate that lets in who has the same one."""
    both = pem.read_bytes()
    return grpc.ssl_server_credentials([(both, both)], both, require_client_auth=True)


@pytest.mark.parametrize(
    ("subject", "names"), [("/CN=x", "DNS:*.svc.local"), ("/CN=worker.local", ""), ("/CN=x", "IP:10.0.0.1")]
)
async def test_a_grpc_worker_can_be_taken_for_what_it_says(subject: str, names: str, tmp_path: Path) -> None:
    """Its certificate is of no known authority and says another name; a client's own certificate is shown all the same."""
    pem = make_certificate(tmp_path, subject, names)
    fake = FakeServer()
    metrics = [f"http://127.0.0.1:{await fake.start()}/metrics"]
    try:
        async with grpc_door(fake, asking_everybody(pem)) as (port, _):
            url, trust = f"grpcs://127.0.0.1:{port}", Trust(insecure=True, client_cert=str(pem))
            plan = replace(PLAN, how=(How.RST_STREAM, How.RST, How.FIN))
            result = await run_storm(make_target(url, "fake", metrics_urls=metrics, trust=trust), plan)
            known = make_target(url, "fake", metrics_urls=metrics, trust=Trust(ca=str(pem), client_cert=str(pem)))
            with pytest.raises(TargetError, match="does not answer a plain stream"):
                await run_storm(known, plan)
    finally:
        await fake.stop()
    assert find(result) == ()
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}


@pytest.mark.parametrize(
    ("subject", "days", "message"), [("/O=nobody", 1, "certificate names nobody"), ("/CN=x", -1, "certificate has expired")]
)
async def test_what_grpc_cannot_take_is_told(subject: str, days: int, message: str, tmp_path: Path) -> None:
    pem = make_certificate(tmp_path, subject, days=days)
    async with grpc_door(FakeServer(), asking_everybody(pem)) as (port, _):
        with pytest.raises(TargetError, match=message):
            await find_model(f"grpcs://127.0.0.1:{port}", {}, Trust(insecure=True))


def arm(url: str, tls: str) -> str:
    arms = "".join(
        f'[arms.{name}]\nurl = "{url}"\nready_url = "{url}/health"\ntls = {tls}\n' for name in ("control", "treatment")
    )
    text = EXPERIMENT.format(server="true")
    return text[: text.index("[arms.control]")] + arms + text[text.index("[storm]") :]


async def test_an_experiments_arm_has_certificates(certificate: Path) -> None:
    pem = str(certificate)
    async with over_tls(certificate, clients=certificate) as url:
        result = await run_experiment(parse(arm(url, f'{{ ca = "{pem}", client_cert = "{pem}" }}'), "x"), Options(trials=1))
        stranger = arm(url, "{ insecure = true }").replace("[storm]", "ready_timeout = '300ms'\n[storm]")
        with pytest.raises(Environment, match="did not answer 200"):
            await run_experiment(parse(stranger, "x").model_copy(update={"trials": 1}), Options(aa="treatment"))
    assert [trial["victims"]["left"] for one in result["arms"].values() for trial in one["trials"]] == [3, 3]


WRONG = {
    "ca: .*nosuch: No such file": Trust(ca="nosuch"),
    "ca: .*empty is not a PEM file of certificates": Trust(ca="empty"),
    "client_cert: .*empty is not a PEM file of a certificate and its key": Trust(client_cert="empty"),
    "client_key: goes with client_cert": Trust(client_key="empty"),
    "insecure: verifies nobody, so ca has no use": Trust(ca="empty", insecure=True),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_used_is_named(message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("nothing")
    named = {
        name: str(tmp_path / value) for name in ("ca", "client_cert", "client_key") if (value := getattr(WRONG[message], name))
    }
    trust = replace(WRONG[message], **named)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_trust(trust)
    flags = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", value)]
    words = ["storm", "https://127.0.0.1:1", *flags, *(["--insecure"] if trust.insecure else [])]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 2 and f"--{message.partition(':')[0].replace('_', '-')}: " in told.stderr
    inline = ", ".join(
        [*(f'{name} = "{value}"' for name, value in named.items()), *(["insecure = true"] if trust.insecure else [])]
    )
    with pytest.raises(ExperimentError, match=rf"^x:\d+: arms\.control\.tls: {message}"):
        parse(arm("https://127.0.0.1:1", f"{{ {inline} }}"), "x")
