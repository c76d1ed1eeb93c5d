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
    time_scale: Annotated[float, typer.Option(min=0.001, max=1_000, help="Multiplies the durations of pacing and storm")] = 1.0,
    owned: Annotated[bool, typer.Option("--i-own-this-target", help="Allow arms that are not on this machine")] = False,
) -> None:
    """Run an experiment. Exit codes: 0 confirmed, 1 refuted or mixed, 2 usage or environment, 3 inconclusive."""
    from windtunnel.lab.experiment import Options

    commands = {arm: one for arm, one in (("control", control_cmd), ("treatment", treatment_cmd)) if one is not None}
    options = Options(trials, seed, time_scale, commands, ready_url, owned, out)
    raise typer.Exit(_run_and_deliver(name, options, as_json=as_json))


def run_and_deliver(name: str, out: Path, trials: int | None) -> int:
    """Run a built-in experiment with its own settings, print and write its results; the exit code of its verdict."""
    from windtunnel.lab.experiment import Options

    return _run_and_deliver(name, Options(trials=trials, out=out), as_json=False)


def _run_and_deliver(name: str, options: "Options", *, as_json: bool) -> int:
    from windtunnel.cli.glue import fail, run_stoppable
    from windtunnel.lab.experiment_file import Environment, load
    from windtunnel.lab.target import TargetError
    from windtunnel.lab.verdict import EXIT_CODES

    try:
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        experiment = load(name)
        document = run_stoppable(lambda stop: _run(experiment, options, stop))
    except (ValueError, OSError, TargetError, Environment) as error:
        fail(str(error))
    _deliver(document, options.out, as_json=as_json)
    return EXIT_CODES[document["verdict"]]


async def _run(experiment: "Experiment", options: "Options", stop: Any) -> dict[str, Any]:
    from windtunnel.lab.experiment import run_experiment
    from windtunnel.lab.progress import experiment_watch

    with experiment_watch(experiment.title) as tell:
        return await run_experiment(experiment, options, stop=stop, watch=tell)


def _deliver(document: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    import json

    from windtunnel.lab.progress import print_experiment
    from windtunnel.lab.report import write_all

    if out is not None:
        write_all(document, out)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        print_experiment(document, out)
