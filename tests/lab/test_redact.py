"""No key and no personal datum survives in a document; everything else does."""

import pytest

from windtunnel.lab.redact import REPLACEMENT, redact, secrets_of


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
