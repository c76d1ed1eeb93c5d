"""`windtunnel selftest`: the lab, blind, over every planted defect and as many clean servers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.exits import FINDING, INCONCLUSIVE, OK

if TYPE_CHECKING:
    from windtunnel.lab.selftest import Case, Run, Turn
    from windtunnel.lab.selftest_log import RunLog


def register(app: typer.Typer) -> None:
    app.command("selftest")(selftest)


def selftest(
    runs: Annotated[int, typer.Option(min=1, max=1_000, help="Servers for each defect; as many clean ones in all")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="This defect only; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order, the prompts and the servers")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=32, help="Servers at a time")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for selftest.json, and runs.jsonl with each run as it ends")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that the folder of --out has")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Say how well the lab finds what is planted, and how often it cries wolf.

    Exit codes: 0 every defect is named right in 19 of 20 runs and no clean server raises anything, 1 otherwise, 2 usage,
    3 stopped before all servers were tried.
    """
    import json
    from contextlib import closing, nullcontext

    from windtunnel.lab.selftest_document import summary
    from windtunnel.lab.selftest_log import head_of

    cases = _cases(only or [])
    head = head_of(cases, runs, seed)
    log = _log(out, cases, head, resume=resume)
    with nullcontext() if log is None else closing(log):
        document = {**_run(cases, head, jobs, log), **head}
        text = json.dumps(document, indent=2)
        if out is not None:
            (out / "selftest.json").write_text(text + "\n", "utf-8")
    typer.echo(text if as_json else "\n".join(summary(document)))
    raise typer.Exit(OK if document["goal_met"] else FINDING if document["complete"] else INCONCLUSIVE)


def _log(out: Path | None, cases: "list[Case]", head: dict[str, Any], *, resume: bool) -> "RunLog | None":
    from windtunnel.cli.glue import fail
    from windtunnel.lab.selftest_log import LogError, RunLog

    if out is None:
        return fail("--resume: name the folder with --out") if resume else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "runs.jsonl"
        return RunLog.go_on(path, head, cases) if resume else RunLog.begin(path, head)
    except (OSError, LogError) as error:
        fail(str(error))


def _run(cases: "list[Case]", head: dict[str, Any], jobs: int, log: "RunLog | None") -> dict[str, Any]:
    """Servers start from the sources each time: a document over sources that have changed meanwhile is incomplete."""
    from windtunnel.cli.glue import run_stoppable
    from windtunnel.lab.document import environment, versions
    from windtunnel.lab.selftest import run_selftest, schedule
    from windtunnel.lab.selftest_document import selftest_document
    from windtunnel.lab.selftest_log import code_state

    order = schedule(cases, head["runs"], head["seed"])
    before = log.done if log is not None else {}
    done = list(before.values())

    def tell(turn: "Turn", run: "Run") -> None:
        done.append(run)
        if log is not None:
            log.add(turn, run)
        _tell(run, len(done), len(order))

    todo = [turn for turn in order if turn not in before]
    run_stoppable(lambda stop: run_selftest(todo, jobs=jobs, stop=stop, tell=tell))
    changed = code_state() != head["code"]
    document = selftest_document(done, len(order), one_state=not changed)
    return {**document, "jobs": jobs, "versions": versions(), "environment": environment()}


def _cases(only: list[str]) -> "list[Case]":
    from windtunnel.cli.glue import fail
    from windtunnel.faults.catalogue import CATALOGUE
    from windtunnel.lab.selftest import FURTHER, Case

    cases = [Case(entry.name, entry.finding) for entry in CATALOGUE.values() if not entry.pair]
    cases += FURTHER
    names = [case.fault for case in cases]
    unknown = sorted(set(only) - set(names))
    if unknown:
        fail(f"--only {unknown[0]!r} is not a defect of the battery; those are {', '.join(names)}")
    return [case for case in cases if not only or case.fault in only]


def _tell(run: "Run", done: int, total: int) -> None:
    name = "clean" if run.case is None else f"{run.case.fault} (due: {run.case.finding})"
    found = ", ".join(run.names) or "nothing"
    typer.echo(f"[{done}/{total}] seed {run.seed} {run.seconds:5.1f} s  {name}: {found}", err=True)
