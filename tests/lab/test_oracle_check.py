"""Loss, repetition and crossing, told apart by the words alone."""

import pytest

from windtunnel.core import oracle
from windtunnel.lab.oracle_check import Known, check_text, identity, judge
from windtunnel.lab.plan import Api, Role
from windtunnel.lab.record import Ask, Damage, End, StreamRecord

WORDS = oracle.words(identity(1), 0, 20)
OTHER = oracle.words(identity(2), 0, 20)
KNOWN = Known([Ask(tag, Role.LATER, 0, Api.COMPLETIONS, "", 20, True) for tag in (1, 2)])


@pytest.mark.parametrize(
    ("received", "damage", "position"),
    [
        (WORDS[:3] + WORDS[4:], Damage.MISSING, 3),
        (WORDS[:6] + WORDS[3:], Damage.DUPLICATED, 6),
        (WORDS[:6] + OTHER[6:], Damage.FOREIGN, 6),
        ([*WORDS[:6], "nonsense", *WORDS[7:]], Damage.WRONG, 6),
        (WORDS[:19], Damage.MISSING, 19),
        ([*WORDS, "extra"], Damage.WRONG, 20),
        ([], Damage.MISSING, 0),
    ],
)
def test_damage(received: list[str], damage: Damage, position: int) -> None:
    fault = check_text(1, received, KNOWN, whole=20)
    assert fault is not None
    assert (fault.damage, fault.position) == (damage, position)
    assert fault.owner == (2 if damage is Damage.FOREIGN else None)


def test_the_right_text_has_no_fault() -> None:
    assert check_text(1, WORDS, KNOWN, whole=20) is None


@pytest.mark.parametrize("count", range(20))
def test_any_beginning_is_right_when_the_text_may_end_anywhere(count: int) -> None:
    assert check_text(1, WORDS[:count], KNOWN, whole=None) is None


def test_a_piece_of_the_last_word_is_right_when_the_text_may_end_anywhere() -> None:
    assert check_text(1, [*WORDS[:5], WORDS[5][:2]], KNOWN, whole=None) is None
    assert check_text(1, [*WORDS[:5], WORDS[5][:2], WORDS[6]], KNOWN, whole=None) is not None


@pytest.mark.parametrize(
    ("api", "reason", "damage"),
    [
        (Api.COMPLETIONS, "stop", Damage.MISSING),
        (Api.MESSAGES, "max_tokens", Damage.MISSING),
        (Api.MESSAGES, "end_turn", None),
    ],
)
def test_an_answer_may_end_early_where_no_length_can_be_asked_for(api: Api, reason: str, damage: Damage | None) -> None:
    ask = Ask(1, Role.LATER, 0, api, "", 20, True)
    record = StreamRecord(ask, End.FINISHED, 0, 1, words=tuple(WORDS[:12]), finish_reason=reason)
    (judged,) = judge([record], KNOWN, exact_length=True)
    assert (judged.fault.damage if judged.fault else None) is damage
