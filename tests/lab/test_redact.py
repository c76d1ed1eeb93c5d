"""No key and no personal datum survives in a document; everything else does."""

from pathlib import Path

import pytest

from windtunnel.lab.redact import REPLACEMENT, hide_passwords, redact, redact_file, secrets_of


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("serve --api-key s3cr3t --port 1", "s3cr3t"),
        ("serve --api-key='two words' --port 1", "two words"),
        ("VLLM_API_KEY=s3cr3t vllm serve", "s3cr3t"),
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("key sk-proj-0123456789", "sk-proj-0123456789"),
        ("cannot open /home/jane/model", "jane"),
        ("by jane.doe@example.org", "jane.doe"),
        ("http://jane:pw@host/v1", "jane"),
    ],
)
def test_what_looks_like_a_secret_goes(text: str, secret: str) -> None:
    cleaned = redact({"a": [text]})["a"][0]
    assert secret not in cleaned
    assert REPLACEMENT in cleaned


def test_header_values_go_wherever_they_turn_up() -> None:
    secrets = secrets_of({"authorization": "Bearer quite-odd", "x-api-key": "plain", "accept": "text/html"})
    assert (
        redact("wrong key 'quite-odd', also plain text/html", secrets)
        == f"wrong key '{REPLACEMENT}', also {REPLACEMENT} text/html"
    )


def test_everything_else_stays() -> None:
    document = {"t_s": 1.5, "words": ["serve --port 8000 --itl 5ms --max-tokens 400", None, True], "n": {"tokens:3": 4}}
    assert redact(document) == document


def test_passwords_in_urls_are_not_echoed() -> None:
    assert (
        hide_passwords("'http://u:geheim@host:1/x' is not a base URL") == f"'http://{REPLACEMENT}@host:1/x' is not a base URL"
    )
    assert hide_passwords("write to me@example.org") == "write to me@example.org"


def test_a_log_is_cleaned_in_place(tmp_path: Path) -> None:
    log = tmp_path / "control-1.log"
    log.write_text("serve --api-key geheim1\nplain odd-value\n")
    redact_file(log, {"odd-value"})
    assert log.read_text() == f"serve --api-key {REPLACEMENT}\nplain {REPLACEMENT}\n"
    assert [one.name for one in tmp_path.iterdir()] == ["control-1.log"]
    redact_file(tmp_path / "none")
