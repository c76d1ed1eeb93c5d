"""Files that are right, and errors that name the key and the line."""

import re

import pytest

from windtunnel.lab.connection import How
from windtunnel.lab.experiment_file import Experiment, ExperimentError, built_ins, find_line, load, parse
from windtunnel.lab.plan import Moment


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize("name", built_ins())
def test_built_ins_are_valid_and_carry_their_name(name: str) -> None:
    experiment = load(name)
    assert experiment.name == name
    assert experiment.title


def test_cancelled_streams_is_the_investigation() -> None:
    plan = load("cancelled-streams").storm.plan(seed=1, time_scale=1.0)
    assert (plan.victims, plan.bystanders, plan.later) == (20, 40, 20)
    assert [kind.name for kind in plan.bystander_kinds] == ["metrics", "completion"]
    assert load("cancelled-streams").trials == 3
    assert set(plan.how) == {How.FIN, How.RST}


def test_durations_and_the_time_scale(text: str) -> None:
    text = text.replace("victims = 3", 'victims = 3\nwhen = "after:100ms"\nobserve = "2s"')
    plan = parse(text, "x").storm.plan(seed=0, time_scale=2)
    assert plan.when.moment is Moment.AFTER
    assert plan.when.after_ns == 50_000_000
    assert plan.observe_ns == 1_000_000_000
    assert plan.quiet_deadline_ns == 5_000_000_000


@pytest.mark.parametrize(
    ("old", "new", "at", "key", "message"),
    [
        ("later = 4", 'later = "four"', "later =", "storm.later", "valid integer"),
        ("later = 4", "latter = 4", "latter =", "storm.latter", "there is no such key; did you mean later?"),
        ('sample_every = "10ms"', "sample_every = 10", "sample_every", "storm.sample_every", "write a number with a unit"),
        ("victims = 3", 'victims = 3\nwhen = "soon"', "when =", "storm.when", "none of incomplete, sent"),
        ('operator = ">"', 'operator = "=>"', "=>", "predictions.0.operator", "Input should be '=='"),
        ("value = 0\n\n[effect]", "value = 0\nwhom = 1\n\n[effect]", "whom", "predictions.1.whom", "there is no such key"),
        ("trials = 2", "trials = 0", "trials", "trials", "greater than or equal to 1"),
        ("{ race", '{ bad = "(", race', "[arms.control]", "arms.control", "not a regular expression"),
    ],
)
def test_errors_name_key_and_line(text: str, old: str, new: str, at: str, key: str, message: str) -> None:
    broken = text.replace(old, new, 1)
    with pytest.raises(ExperimentError) as caught:
        parse(broken, "fake.toml")
    assert str(caught.value).startswith(f"fake.toml:{line_of(broken, at)}: {key}: ")
    assert message in str(caught.value)


def test_a_wrong_item_is_one_problem(text: str) -> None:
    only = text[: text.index('[[predictions]]\nid = "clean"')] + text[text.index("[effect]") :]
    with pytest.raises(ExperimentError) as caught:
        parse(only.replace('operator = ">"', 'operator = "=>"'), "fake.toml")
    assert "predictions.0.operator" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ExperimentError, match=r"predictions: .*at least 1 item"):
        parse(only.replace("[[predictions]]", "[[ignored]]").replace("trials = 2", "trials = 2\npredictions = []"), "fake.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name = ", "nom = ", "name: Field required"),
        ('id = "clean"', 'id = "harms"', "'harms' is used twice"),
        ("victims = 3", "victims = 3_000", "--max-requests"),
        ("title = ", "title = = ", "not TOML"),
    ],
)
def test_errors_of_the_whole_file(text: str, old: str, new: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        parse(text.replace(old, new, 1), "fake.toml")


def test_an_arm_is_a_command_or_a_url(text: str) -> None:
    with pytest.raises(ExperimentError, match="either command or url"):
        parse(text.replace("[arms.treatment]", '[arms.treatment]\nurl = "http://127.0.0.1:1"'), "x")


def test_unknown_names_are_told_what_there_is() -> None:
    with pytest.raises(ExperimentError, match="cancelled-streams"):
        load("no-such-experiment")


def test_find_line_falls_back_to_the_table(experiment: Experiment, text: str) -> None:
    assert find_line(text, ["storm", "absent"]) == line_of(text, "[storm]")
    assert find_line(text, ["nowhere"]) is None


ARM_KEYS = {
    "metrics_urls = ['http://127.0.0.1:1/metrics', 'ftp://h/m']": (
        r"metrics_urls\.1: 'ftp://h/m' is not a base URL",
        "metrics_urls",
    ),
    "metrics_urls = ['http://a:1/m,http://b:1/m']": (r"metrics_urls\.0: .*one URL each", "metrics_urls"),
    "target = 'quic://127.0.0.1:{port}'": (r"target: .*h2c:// or h2://", "target"),
    "target = 'grpc://127.0.0.1:{port2}/v1'": ("target: .*no path", "target"),
    "storm = { how = ['rst-stream'] }": (r"storm\.how: rst-stream is for HTTP/2 and gRPC", "storm"),
    "target = 'grpc://127.0.0.1:{port2}'\nstorm = { how = ['kill'] }": (r"storm\.how: kill is for HTTP", "storm"),
    "storm = { victims = -1 }": (r"storm\.victims: -1 is below 0", "storm"),
}


@pytest.mark.parametrize("lines", ARM_KEYS)
def test_an_arms_error_names_key_and_line_and_no_flag(text: str, lines: str) -> None:
    message, key = ARM_KEYS[lines]
    broken = text.replace("[arms.treatment]\n", f"[arms.treatment]\n{lines}\n")
    at = next(number for number, line in enumerate(broken.splitlines(), 1) if line.startswith(f"{key} ="))
    with pytest.raises(ExperimentError, match=rf"^x:{at}: arms\.treatment\.{message}") as caught:
        parse(broken, "x")
    assert "--" not in str(caught.value)


def test_a_storm_that_an_arms_protocol_does_not_know_names_its_line(text: str) -> None:
    broken = text.replace("[storm]\n", "[storm]\nhow = ['rst-stream']\n")
    with pytest.raises(ExperimentError, match=rf"^x:{line_of(broken, 'how =')}: storm\.how: rst-stream is for HTTP/2"):
        parse(broken, "x")
    one = broken.replace("[arms.control]\n", "[arms.control]\ntarget = 'h2c://127.0.0.1:{port}'\n")
    with pytest.raises(ExperimentError, match=r"the treatment arm speaks http$"):
        parse(one, "x")
    both = one.replace("[arms.treatment]\n", "[arms.treatment]\ntarget = 'grpc://127.0.0.1:{port2}'\n")
    assert [arm.scheme for _, arm in parse(both, "x").arms] == ["h2c", "grpc"]


def test_a_target_belongs_to_a_command(text: str) -> None:
    lines = "[arms.treatment]\nurl = 'http://127.0.0.1:1'\ntarget = 'h2c://127.0.0.1:1'\n"
    broken = re.sub(r"(?ms)^\[arms\.treatment\]\n.*?^\[storm\]", f"{lines}[storm]", text)
    with pytest.raises(ExperimentError, match="target belongs to a command"):
        parse(broken, "x")
