"""`windtunnel calibrate TRACE…`: fit a profile to measured requests, and say how well it predicts the rest."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windtunnel.core.profile import Profile
    from windtunnel.sim.calibrate.fit import Fit
    from windtunnel.sim.calibrate.measured import Run
    from windtunnel.sim.calibrate.prediction import Prediction


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    traces: Annotated[
        list[Path], typer.Argument(help="Request traces: windtunnel's own JSONL, vllm bench serve, AIPerf, GuideLLM")
    ],
    trace_format: Annotated[str, typer.Option("--format", help="auto, windtunnel, vllm-bench, aiperf or guidellm")] = "auto",
    concurrency: Annotated[str, typer.Option(help="Clients of each trace, in order, where a format does not say: 1,8")] = "",
    fit_concurrency: Annotated[str, typer.Option(help="Fit on runs with so many clients; the others are predicted")] = "1,8",
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Fit nothing: predict every run with this profile")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Use only runs whose name has one of these words at its start: 'pass 1,pass 3'")
    ] = "",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Of the measured server")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of the measured server")] = 2048,
    block_size: Annotated[int, typer.Option(min=1, help="Of the measured server")] = 16,
    cores: Annotated[int, typer.Option(min=0, max=100_000, help="Of the measured machine; 0: not known")] = 0,
    cpu: Annotated[
        list[Path] | None,
        typer.Option(
            help="What other jobs took of these cores: JSONL with t_s and other_cores (docs/calibration.md); may be repeated"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search and the predictions")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Predictions are means over so many seeds")] = 5,
    rounds: Annotated[
        int,
        typer.Option(min=1, max=1000, help="At most so many of the search"),
    ] = 6,
    out: Annotated[Path | None, typer.Option(help="Write the profile here, for windtunnel serve --profile")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Fit a profile to measured requests, print the goodness of fit, and predict the runs that were left out."""
    from windtunnel.cli.glue import fail
    from windtunnel.core.profile import ProfileError
    from windtunnel.sim.calibrate.cpu import beside_other_jobs, read_other_jobs, uncovered
    from windtunnel.sim.calibrate.fit import Fit, fit
    from windtunnel.sim.calibrate.formats import TraceError
    from windtunnel.sim.calibrate.lone import FitError, unseen
    from windtunnel.sim.calibrate.prediction import predict
    from windtunnel.sim.calibrate.replay import EngineLimits

    limits = EngineLimits(max_num_seqs, max_num_batched_tokens, block_size)
    try:
        runs = _read(traces, trace_format, _numbers("--concurrency", concurrency), only)
        if cpu:
            runs = beside_other_jobs(runs, read_other_jobs(cpu))
            if not (cores or profile_file):
                fail("--cpu needs --cores: how many the measured machine has")
            for doubt in uncovered(runs):
                _say(doubt)
        fitted = [] if profile_file else _to_fit(runs, _numbers("--fit-concurrency", fit_concurrency))
        source = f"{', '.join(path.name for path in traces)}: {', '.join(run.name for run in fitted)}; seed {seed}"
        if profile_file:
            found = Fit(_load(profile_file), {}, None)
            if cpu and not found.profile.machine.cores:
                fail(f"--cpu: {profile_file.name} does not know its machine; calibrate it with --cores")
        else:
            found = fit(fitted, limits, seed=seed, rounds=rounds, cores=cores, say=_say, source=source)
            for doubt in unseen(runs, fitted):
                _say(doubt)
    except (TraceError, FitError, ProfileError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    if out is not None:
        _write(out, found)
    rows = predict(runs, fitted, found.of, limits, range(seed + 100, seed + 100 + seeds))
    _report(found, rows, as_json=as_json)


def _load(path: Path) -> "Profile":
    import json

    from windtunnel.core.profile import ProfileError, from_mapping

    try:
        return from_mapping(json.loads(path.read_text("utf-8")))
    except RecursionError:
        raise ProfileError(f"{path.name}: is nested too deeply") from None
    except ValueError as error:
        raise ProfileError(f"{path.name}: {error}") from None


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _numbers(flag: str, text: str) -> list[int]:
    from windtunnel.cli.glue import fail

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        fail(f"{flag} {text!r}: write whole numbers with commas, such as 1,8")
    return [int(part) for part in parts]


def _read(traces: Sequence[Path], trace_format: str, concurrency: Sequence[int], only: str) -> "list[Run]":
    from windtunnel.sim.calibrate.formats import READERS, TraceError, read_runs

    if trace_format not in ("auto", *READERS):
        raise TraceError(f"--format {trace_format}: must be auto or one of {', '.join(READERS)}")
    if concurrency and len(concurrency) != len(traces):
        raise TraceError(f"--concurrency has {len(concurrency)} numbers for {len(traces)} traces")
    given: Sequence[int | None] = concurrency or [None] * len(traces)
    runs = [run for path, clients in zip(traces, given, strict=True) for run in read_runs(path, trace_format, clients)]
    runs = list(_distinct(runs))
    starts = tuple(word.strip() + " " for word in only.split(",") if word.strip())
    kept = [run for run in runs if not starts or f"{run.name} ".startswith(starts)]
    if not kept:
        raise TraceError(f"no run is left: --only {only!r} fits none of {', '.join(run.name for run in runs)}")
    return kept


def _distinct(runs: "Sequence[Run]") -> "Iterator[Run]":
    """With names of their own: two traces may each have a run of one client."""
    from collections import Counter
    from dataclasses import replace

    seen: Counter[str] = Counter()
    for run in runs:
        seen[run.name] += 1
        yield replace(run, name=f"{run.name} ({seen[run.name]})") if seen[run.name] > 1 else run


def _to_fit(runs: "Sequence[Run]", concurrency: Sequence[int]) -> "list[Run]":
    for clients in concurrency:
        if all(run.concurrency != clients for run in runs):
            _say(f"--fit-concurrency: no run has {clients} client{'s' * (clients > 1)}; there are {_loads(runs)}")
    return [run for run in runs if run.concurrency in concurrency]


def _loads(runs: "Sequence[Run]") -> str:
    return ", ".join(run.name or "a run without a name" for run in runs)


def _write(out: Path, found: "Fit") -> None:
    """One profile of all, and beside it one of each group where there are several."""
    import json

    profiles = {out: found.profile}
    if len(found.groups) > 1:
        profiles |= {out.with_suffix(f".{name.replace(' ', '-')}{out.suffix}"): one for name, one in found.groups.items()}
    for path, profile in profiles.items():
        path.write_text(json.dumps(profile.as_mapping(), indent=1) + "\n", "utf-8")
        _say(f"wrote {path}")


def _report(found: "Fit", rows: "Sequence[Prediction]", *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from windtunnel.sim.calibrate.prediction import DRIFT_MARK, NOISE_MARK, markdown, summary

    if as_json:
        table = [{**asdict(row), "error": row.error, "hit": row.hit} for row in rows]
        groups = {name: profile.as_mapping() for name, profile in found.groups.items()}
        document = {"profile": found.profile.as_mapping(), "groups": groups, "distance": found.distance, "predictions": table}
        typer.echo(json.dumps(document))
        return
    typer.echo(markdown(rows))
    typer.echo(
        f"\nmeasured → predicted, in ms; bold: off by more than 10 % (p50) or 20 % (p99). Fitted on {found.profile.source}."
    )
    typer.echo(f"{NOISE_MARK.strip()} within the measured quantile's 95 % interval, from resampled requests.")
    typer.echo(
        f"{DRIFT_MARK.strip()} the first and the second half of the run, each by its prediction, differ by more than that."
    )
    if found.distance is not None:
        typer.echo(f"Goodness of fit: weighted squared log ratio of quantiles {found.distance:.4f} (0: equal).")
    for line in summary([row for row in rows if not row.fitted]):
        typer.echo(line)
