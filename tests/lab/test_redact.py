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


@pytest.mark.parametrize(
    "text",
    [
        "AWS_SECRET_ACCESS_KEY={} vllm serve",
        "AWS_ACCESS_KEY_ID={} vllm serve",
        "AZURE_OPENAI_API_KEY={} vllm serve",
        "HUGGING_FACE_HUB_TOKEN={} vllm serve",
        "HF_TOKEN={} vllm serve",
        "api_key={} serve",
        "client_secret={}",
        "DB_PASS={} serve",
        "PGPASSWORD='{}' psql",
        'PGPASSWORD="two {}" psql',
        "curl -H 'X-Api-Key: {}' http://h",
        'curl -H "api-key: {}" http://h',
        "storm --header 'Authorization: {}' --seed 1",
        "storm --header 'Authorization: Token {}' --seed 1",
        "storm --header='Authorization: {}'",
        "storm --header 'Cookie: a=b; session={}'",
        "storm --header 'x-goog-api-key:{}'",
        "GET http://h:1/v1/models?api_key={} HTTP/1.1",
        "http://h/metrics?tenant=a&token={}",
        "http://h/metrics?sig={}&x=1",
        '{{"api_key": "{}"}}',
        '{{"openai_api_key":"{}", "n": 1}}',
        '{{\\"api_key\\": \\"{}\\"}}',
        "Namespace(api_key=['{}'], port=1)",
        "Namespace(api_key='{}', port=1)",
        "{{'password': '{}'}}",
        "password: {}",
        "serve --auth-token={} --port 1",
        "['serve', '--api-key', '{}', '--port', '1']",
        '["--api-key", "{}"]',
        "'--header=X-Api-Key: {}'",
        "serve --api-key '{}' --port 1",
        "serve --hf-token {} --port 1",
    ],
)
def test_the_value_of_a_secret_goes(text: str) -> None:
    cleaned = redact(text.format("Gh3imnis42"))
    assert "Gh3imnis42" not in cleaned and REPLACEMENT in cleaned
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize(
    "secret",
    [
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
        "AKIAIOSFODNN7EXAMPLE",
        "github_pat_11ABCDEFG0123456789",
        "glpat-0123456789abcdefghij",
        "sk-ant-api03-0123456789",
    ],
)
def test_what_is_a_secret_by_its_form_goes(secret: str) -> None:
    assert redact(f"got {secret}, sorry") == f"got {REPLACEMENT}, sorry"


@pytest.mark.parametrize(
    "text",
    [
        "storm --max-tokens 400 --set survivor.max_tokens=20",
        "prompt_tokens: 5, completion_tokens: 7",
        '{"prompt_tokens": 5, "max_tokens": 400, "token_ids": [1, 2], "logprobs": {"tokens": ["a"]}}',
        "tokens_per_second=12.5 token_usage=0.25 num_tokens=3",
        "serve --tokenizer x --skip-tokenizer-init --token-budget 5 --tokenizer-mode auto",
        "--max-num-batched-tokens=8192 --key-cache fp8 --kv-cache-dtype auto",
        "generation_tokens_total 41.0",
        'vllm:time_per_output_token_seconds_bucket{le="0.01"} 3',
        "--when tokens:3 --how fin,rst",
        "bypass=1 compass=2 passed: 3, monkey=4, keyboard: us",
        "token: 5 of 12; key: running",
        "inter-token latency: 5 ms, author: someone",
        "{'key': 'value', 'author': 'x'}",
        "storm --header 'Accept: text/html' --header 'x-request-id: 7'",
        "token_type_ids=None eos_token='</s>' eos_token_id=2 stop_token: x pad_token=0",
        "http://h/metrics?name=a&max_tokens=5",
    ],
)
def test_what_only_sounds_like_one_stays(text: str) -> None:
    assert redact(text) == text


def test_header_values_go_wherever_they_turn_up() -> None:
    secrets = secrets_of({"authorization": "Bearer quite-odd", "x-api-key": "plain", "accept": "text/html"})
    assert (
        redact("wrong key 'quite-odd', also plain text/html", secrets)
        == f"wrong key '{REPLACEMENT}', also {REPLACEMENT} text/html"
    )


def test_variables_that_hold_no_secret_are_no_secrets() -> None:
    assert secrets_of({"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4000", "AUTHOR": "jane"}) == set()
    assert secrets_of({"DB_PASS": "geheim"}) == {"geheim"}


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
