"""A result for CI: one testcase per prediction and one per finding that no prediction's arm foresees."""

from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

Document = Mapping[str, Any]


def junit_xml(document: Document) -> str:
    """Predictions that fail and findings of the treatment are failures; undecided predictions are skipped.

    Findings of the control arm pass: that arm is there to show them.
    """
    suite = Element(
        "testsuite", name=document["experiment"], timestamp=document["started_at"], time=str(document["duration_s"])
    )
    for prediction in document["predictions"]:
        _prediction(suite, prediction)
    for finding in document["findings"]:
        _finding(suite, finding)
    return _text(suite)


def storm_junit_xml(document: Document) -> str:
    """One storm: a testcase that is skipped when the storm proves nothing, and a failure for each finding."""
    suite = Element("testsuite", name=f"storm {document['target']}", timestamp=document["started_at"])
    case = SubElement(suite, "testcase", classname="storm", name="the storm ran and its clients left")
    if document["untried"]:
        SubElement(case, "skipped", message=document["untried"])
    for finding in document["findings"]:
        case = SubElement(suite, "testcase", classname="finding", name=finding["name"])
        SubElement(case, "failure", message=finding["usual_cause"]).text = "\n".join(finding["evidence"])
    return _text(suite)


def _text(suite: Element) -> str:
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    root = Element("testsuites")
    root.append(suite)
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _prediction(suite: Element, prediction: Document) -> None:
    case = SubElement(
        suite, "testcase", classname=f"prediction.{prediction['arm']}", name=f"{prediction['id']}: {prediction['text']}"
    )
    rule = f"{prediction['metric']} {prediction['operator']} {prediction['value']} ({prediction['over']} trial)"
    seen = f"{rule}; observed {prediction['observed']}"
    if prediction["holds"] is None:
        SubElement(case, "skipped", message=f"undecided: {seen}")
    elif not prediction["holds"]:
        SubElement(case, "failure", message=f"does not hold: {seen}")


def _finding(suite: Element, finding: Document) -> None:
    case = SubElement(
        suite, "testcase", classname=f"finding.{finding['arm']}", name=f"{finding['name']} in trial {finding['trial']}"
    )
    text = "\n".join(finding["evidence"])
    if finding["arm"] == "treatment":
        SubElement(case, "failure", message=finding["usual_cause"]).text = text
    else:
        SubElement(case, "system-out").text = text
