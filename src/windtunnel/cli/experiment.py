"""`windtunnel experiment list|run|show`: control against treatment, with predictions written down before."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windtunnel.lab.experiment import Options
    from windtunnel.lab.experiment_file import Experiment

experiments = typer.Typer(no_args_is_help=True, help="Compare a control arm with a treatment arm.")


def register(app: typer.Typer) -> None:
    app.add_typer(experiments, name="experiment")


@experiments.command("list")
def list_experiments() -> None:
    """The built-in experiments."""
    from windtunnel.lab.experiment_file import built_ins, parse

    for name, text in built_ins().items():
        typer.echo(f"{name}\t{parse(text, name).title}")


@experiments.command("show")
def show(name: Annotated[str, typer.Argument(help="A built-in experiment")]) -> None:
    """Print a built-in experiment file, as a start for one's own."""
    from windtunnel.cli.glue import fail
    from windtunnel.lab.experiment_file import built_ins

    texts = built_ins()
    if name not in texts:
        fail(f"no built-in experiment is called {name!r}; there are: {', '.join(texts)}")
    typer.echo(texts[name], nl=False)


@experiments.command("run")
def run(
    name: Annotated[str, typer.Argument(help="A built-in experiment or a TOML file")],
    trials: Annotated[int | None, typer.Option(min=1, max=1_000, help="Trials of each arm; default: the file's")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and of the arms' order; default: the file's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result, report, JUnit file and server logs")] = None,
    control_cmd: Annotated[str | None, typer.Option(help="Command of the control arm, with {port}")] = None,
    treatment_cmd: Annotated[str | None, typer.Option(help="Command of the treatment arm, with {port}")] = None,
    ready_url: Annotated[str | None, typer.Option(help="Answers 200 when a server is ready, with {port}")] = None,
    time_scale: Annotated[float, typer.Option(min=0.001, max=1_000, help="Divides the durations of pacing and storm")] = 1.0,
    aa: Annotated[str | None, typer.Option(help="control or treatment: run this arm against itself")] = None,
    looks: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="Test so often, from the fourth trial on, and stop at the first effect; alpha is spent"
        ),
    ] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Print how many trials would be needed, and run nothing")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; only the result")] = False,
    owned: Annotated[bool, typer.Option("--i-own-this-target", help="Allow arms that are not on this machine")] = False,
) -> None:
    """Run an experiment. Exit codes: 0 confirmed, 1 refuted or mixed, 2 usage or environment, 3 inconclusive."""
    from windtunnel.cli.glue import fail
    from windtunnel.lab.experiment import Options

    if aa not in (None, "control", "treatment"):
        fail(f"--aa {aa!r} is neither control nor treatment")
    if plan:
        _print_plan(name, trials)
        return
    commands = {arm: one for arm, one in (("control", control_cmd), ("treatment", treatment_cmd)) if one is not None}
    options = Options(trials, seed, time_scale, commands, ready_url, owned, aa, looks, out, name)  # type: ignore[arg-type]  # checked above
    from windtunnel.lab.verdict import EXIT_CODES

    raise typer.Exit(EXIT_CODES[_run_and_deliver(name, options, as_json=as_json, quiet=quiet)])


def run_and_deliver(name: str, out: Path, trials: int | None, time_scale: float) -> str:
    """Run a built-in experiment, print and write its results; the verdict."""
    from windtunnel.lab.experiment import Options

    return _run_and_deliver(name, Options(trials=trials, out=out, time_scale=time_scale), as_json=False)


def _run_and_deliver(name: str, options: "Options", *, as_json: bool, quiet: bool = False) -> str:
    from windtunnel.cli.glue import fail, run_stoppable
    from windtunnel.lab.experiment_file import Environment, load
    from windtunnel.lab.target import TargetError

    try:
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        experiment = load(name)
        document = run_stoppable(lambda stop: _run(experiment, options, stop, quiet=quiet))
    except (ValueError, OSError, TargetError, Environment) as error:
        fail(str(error))
    _deliver(document, options.out, as_json=as_json)
    if document["environment_error"]:
        fail(document["environment_error"])
    verdict: str = document["verdict"]
    return verdict


async def _run(experiment: "Experiment", options: "Options", stop: Any, *, quiet: bool) -> dict[str, Any]:
    from windtunnel.lab.experiment import run_experiment
    from windtunnel.lab.progress import experiment_watch

    with experiment_watch(experiment.title, quiet=quiet) as tell:
        return await run_experiment(experiment, options, stop=stop, watch=tell)


def _deliver(document: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    import json

    from windtunnel.lab.progress import print_experiment
    from windtunnel.lab.report import write_all

    if out is not None:
        write_all(document, out)
    if as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_experiment(document, out)


def _print_plan(name: str, trials: int | None) -> None:
    """The power of the experiment's comparison, as it would be run."""
    from windtunnel.cli.glue import fail
    from windtunnel.lab.experiment_file import load
    from windtunnel.lab.power import least_trials, needs, per_trial_of, power_from_nothing

    try:
        experiment = load(name)
    except (ValueError, OSError) as error:
        fail(str(error))
    effect, storm = experiment.effect, experiment.plan("treatment", seed=0, time_scale=1.0)
    count = trials or experiment.trials
    if effect.of is None:
        typer.echo(
            f"{effect.metric}: means over trials; at least {least_trials(effect.alpha)} trials in each arm, here {count}"
        )
        return
    counts = {"bystanders": storm.bystanders, "later_streams": storm.later, "survivors": storm.survivors * storm.rounds}
    per_trial = per_trial_of({**counts, "victims": storm.victims * storm.rounds}, effect.of)
    typer.echo(f"{effect.metric} of {effect.of}: {per_trial} per trial, alpha {effect.alpha:g}, the other arm at none")
    for need in needs(per_trial, effect.alpha):
        here = power_from_nothing(count * per_trial, need.rate, effect.alpha)
        typer.echo(
            f"  a rate of {need.rate:.0%} with power {need.power:.0%}: {need.requests} per arm = {need.trials} trials"
            f" (power of {count} trials: {here:.1%})"
        )


@experiments.command("new")
def new(
    file: Annotated[Path, typer.Argument(help="The file to write")],
    like: Annotated[str, typer.Option(help="The built-in experiment to start from")] = "cancelled-streams",
) -> None:
    """Write an experiment file to start from, under the file's own name. An existing file is left alone."""
    import re

    from windtunnel.cli.glue import fail
    from windtunnel.lab.experiment_file import built_ins, parse

    texts = built_ins()
    if like not in texts:
        fail(f"--like {like!r} is not built in; there are: {', '.join(texts)}")
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem)
    text = re.sub(r'(?m)^name = ".*"$', f'name = "{name}"', texts[like], count=1)
    parse(text, str(file))
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    typer.echo(f"{file}: edit arms, storm and predictions, then: windtunnel experiment run {file}")
