"""Text for regular expressions and small grammars, with Python's own engine as judge."""

import re

import pytest

from windtunnel.wire.synth import SynthesisError, matching_text
from windtunnel.wire.synth.regex import Regex


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{3}-\d+",
        r"(yes|no)",
        r"^\w+@\w+\.com$",
        r"[^\x00-\x7f]{2}",
        r"a?b*c+?",
        r"\d{4}-(0[1-9]|1[0-2])",
        r"",
        r"\bfoo\b",
    ],
)
def test_regex_text_matches_as_a_whole(pattern: str) -> None:
    for seed in range(20):
        assert re.fullmatch(pattern, matching_text("regex", pattern, seed))


@pytest.mark.parametrize("pattern", ["([", "(?=a)b", r"(a)\1", "a" * 5000, "(?<!x)y", "a{2000}"])
def test_bad_or_unsupported_regex_is_an_error(pattern: str) -> None:
    with pytest.raises(SynthesisError):
        matching_text("regex", pattern, 1)


@pytest.mark.parametrize(
    ("pattern", "text"), [("^a+$", "aaa"), ("b", "abc"), ("^b", "abc"), ("(a|ab)(c|bcd)$", "abcd"), ("x{2,3}", "xx")]
)
def test_search_agrees_with_python(pattern: str, text: str) -> None:
    assert Regex(pattern).search(text) is bool(re.search(pattern, text))


def test_matching_is_not_exponential() -> None:
    assert not Regex("^(a+)+$").search("a" * 2000 + "b")


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        ('root ::= "yes" | "no"', r"yes|no"),
        ('root ::= "a" num # comment\nnum ::= [0-9]+', r"a\d+"),
        ('start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[A-Z][a-z]+/', r"(hi|hello) [A-Z][a-z]+"),
        ('root ::= "(" root ")" | "x"', r"\(*x\)*"),
        ('root ::= ("a" | "b")* "!"?', r"[ab]*!?"),
    ],
)
def test_grammar_text_has_the_form(grammar: str, form: str) -> None:
    for seed in range(20):
        assert re.fullmatch(form, matching_text("grammar", grammar, seed))


@pytest.mark.parametrize(
    "grammar", ["root ::= (", 'other ::= "a"', "root ::= missing", "root ::= root", "?!", 'root ::= "a" ) "b"']
)
def test_bad_grammar_is_an_error(grammar: str) -> None:
    with pytest.raises(SynthesisError):
        matching_text("grammar", grammar, 1)
