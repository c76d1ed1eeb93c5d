"""A result as files, of an experiment or of one storm: the document itself, one self-contained HTML page, and a JUnit file.

The page needs no network and no script: drawings are inline SVG, colours follow the reader's light or dark preference.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.lab.charts import RatePlot, Timeline, percent, rate_plot, shared_scale, timeline
from windtunnel.lab.junit import junit_xml, storm_junit_xml

if TYPE_CHECKING:
    from jinja2 import Template

Document = Mapping[str, Any]

RESULT_NAME = "result.json"
REPORT_NAME = "report.html"
JUNIT_NAME = "junit.xml"
_SHOWN_CHARS = 200
ARMS = ("control", "treatment")
_VERDICT_WORDS = {
    "confirmed": "Confirmed",
    "refuted": "Refuted",
    "mixed": "Mixed",
    "inconclusive": "Inconclusive",
}


class DocumentError(Exception):
    """A document that is not the result of an experiment or a storm; the message names the place."""


def schema(name: str = "experiment") -> dict[str, Any]:
    """The JSON schema of an `experiment`'s document, or of a `storm`'s."""
    text = resources.files("windtunnel.lab").joinpath(f"schema/{name}.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def check_document(document: object) -> None:
    """Raises DocumentError unless the document is one of its schema."""
    from jsonschema import Draft202012Validator

    if not isinstance(document, dict):
        raise DocumentError("not a JSON object")
    kind = "storm" if is_storm(document) else "experiment"
    told, what = schema(kind), "a storm" if kind == "storm" else "an experiment"
    missing = [key for key in told["required"] if key not in document]
    if missing:
        raise DocumentError(f"not the result of {what}: {missing[0]!r} is missing")
    wrong = next(iter(Draft202012Validator(told).iter_errors(document)), None)
    if wrong is not None:
        raise DocumentError(f"not the result of {what}: {wrong.json_path}: {wrong.message[:_SHOWN_CHARS]}")


def is_storm(document: Document) -> bool:
    """One storm by itself, not an experiment."""
    return "target" in document


def write_all(document: Document, folder: Path) -> list[Path]:
    """Write result.json, report.html and junit.xml; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        RESULT_NAME: json.dumps(document, indent=2, allow_nan=False) + "\n",
        REPORT_NAME: storm_html(document) if is_storm(document) else html(document),
        JUNIT_NAME: storm_junit_xml(document) if is_storm(document) else junit_xml(document),
    }
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in files]


def _template(name: str) -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("windtunnel.lab", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (percent, number, p_value, counts, milliseconds)
    environment.filters.update({one.__name__: one for one in filters})
    return environment.get_template(name)


def html(document: Document) -> str:
    """The whole page of an experiment."""
    return _template("report.html.jinja").render(
        document=document,
        verdict=_VERDICT_WORDS[document["verdict"]],
        sentences=sentences(document),
        notes=arm_notes(document),
        rates=_rates(document),
        pairs=_pairs(document),
        findings=_grouped(document["findings"]),
        trials=[trial for arm in ARMS for trial in document["arms"][arm]["trials"]],
    )


def storm_html(document: Document) -> str:
    """The whole page of one storm."""
    tone, verdict = storm_verdict(document)
    roles = ("survivors", "calm", "retries", "later_streams")
    return _template("storm.html.jinja").render(
        document=document,
        verdict=verdict,
        tone=tone,
        sentences=_storm_sentences(document),
        roles=[(role.replace("_", " "), document[role]) for role in roles if document[role]["sent"]],
        line=timeline(document, shared_scale([document])) if document["series"] else None,
    )


def storm_verdict(document: Document) -> tuple[str, str]:
    """The colour of a storm's outcome, and the outcome in a word or two."""
    if document["findings"]:
        count = len(document["findings"])
        return "refuted", f"{count} finding{'s' if count > 1 else ''}"
    if document["untried"]:
        return "inconclusive", "Inconclusive"
    seen = any(value is not None for value in document["leaked"].values())
    return "confirmed", "Clean" if seen else "No finding; leaks: not observable"


def _storm_sentences(document: Document) -> list[str]:
    victims, bystanders, later = document["victims"], document["bystanders"], document["later_streams"]
    quiet = document["quiet_s"]
    out = [
        f"{victims['left']} of {victims['sent']} victims left.",
        f"{bystanders['harmed']} of {bystanders['sent']} bystanders were harmed; {later['complete']} of {later['sent']}"
        " later streams were complete.",
        "The metrics never became quiet." if quiet is None else f"The metrics were quiet {quiet:.2f} s after the start.",
    ]
    return out + ([f"Inconclusive: {document['untried']}."] if document["untried"] else [])


def _rates(document: Document) -> RatePlot | None:
    return rate_plot(document["effect"])


def _pairs(document: Document) -> list[tuple[int, list[tuple[Document, Timeline]]]]:
    """Trials by number, each with the time lines of its arms, all on the same scales."""
    trials = [trial for arm in ARMS for trial in document["arms"][arm]["trials"] if trial["series"]]
    scale = shared_scale(trials)
    numbers = sorted({trial["trial"] for trial in trials})
    return [(number, [(one, timeline(one, scale)) for one in trials if one["trial"] == number]) for number in numbers]


def _grouped(findings: Iterable[Document]) -> list[dict[str, Any]]:
    """Findings of one name in one arm together, with the evidence of each trial."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for one in findings:
        group = groups.setdefault((one["arm"], one["name"]), {**one, "trials": [], "count": 0})
        group["trials"].append({"trial": one["trial"], "evidence": one["evidence"]})
        group["count"] += one["count"]
    return list(groups.values())


def sentences(document: Document) -> list[str]:
    """The verdict in words."""
    out = [_per_arm(arm, document["arms"][arm]["trials"]) for arm in ARMS]
    effect = document["effect"]
    if effect["p_value"] is not None and effect["ci95"]:
        low, high = effect["ci95"]
        as_text = percent if effect.get("of") else number
        out.append(
            f"The difference of {effect['metric']} is {as_text(effect['difference'])}"
            f" (95 % interval {as_text(low)} to {as_text(high)}; {effect['test']}: p {p_value(effect['p_value'])})."
        )
    return out


def arm_notes(document: Document) -> list[str]:
    """What the trials noted, once for each arm that noted it."""
    noted = ((arm, note) for arm in ARMS for trial in document["arms"][arm]["trials"] for note in trial["notes"])
    return [f"{arm}: {note}" for arm, note in dict.fromkeys(noted)]


def _per_arm(arm: str, trials: list[Document]) -> str:
    trials = [trial for trial in trials if trial["error"] is None]
    harmed = [trial["bystanders"]["harmed"] for trial in trials]
    sent = sum(trial["bystanders"]["sent"] for trial in trials)
    complete, later = (sum(trial["later_streams"][key] for trial in trials) for key in ("complete", "sent"))
    if not trials:
        return f"{arm.capitalize()}: no trial that could be judged."
    in_trials = f"{sum(one > 0 for one in harmed)} of {len(trials)} trials"
    return (
        f"{arm.capitalize()} harmed bystanders in {in_trials} ({sum(harmed)} of {sent} requests)"
        f" and completed {complete} of {later} later streams."
    )


def number(value: float | int | None) -> str:
    return "–" if value is None else f"{value:g}"


def p_value(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"= {value:.2g}"


def counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in values.items()) or "–"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"
