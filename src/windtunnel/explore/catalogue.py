"""The scenarios that come with windtunnel, and models from files of the user's own."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from windtunnel.explore.model import Model, ModelError, told

_HOME = "windtunnel.explore"

BUILT_IN: Mapping[str, str] = {
    "kv-status": "scenarios.kv_status",
    "pooled-response": "scenarios.pooled_response",
    "lease-reaper": "examples.lease_reaper",
    "remote-load": "examples.remote_load",
    "metadata-slots": "examples.metadata_slots",
    "n-admission": "examples.n_admission",
}

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Scenario(NamedTuple):
    """A model to explore. `name` is what `explore run` takes: a built-in name or the path of a file."""

    name: str
    model: type[Model]

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.model) or "").partition("\n")[0]


def built_in() -> list[Scenario]:
    return [find(name) for name in BUILT_IN]


def find(name: str) -> Scenario:
    """A built-in scenario, or the one model in a file. Raises ModelError if there is none."""
    if name in BUILT_IN:
        return Scenario(name, _model_in(importlib.import_module(f"{_HOME}.{BUILT_IN[name]}"), name))
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ModelError(f"no scenario {name!r}: give a Python file or one of {', '.join(BUILT_IN)}")
    return Scenario(name, _model_in(_module_from(path), name))


def chosen(scenario: Scenario, settings: Mapping[str, str]) -> Model:
    """The model with its parameters read from text."""
    return scenario.model(**{name: _parsed(scenario, name, text) for name, text in settings.items()})


def _parsed(scenario: Scenario, name: str, text: str) -> Any:
    spec = scenario.model.parameters.get(name)
    if spec is None:
        known = ", ".join(scenario.model.parameters) or "none"
        raise ModelError(f"scenario {scenario.name} has no parameter {name!r}; it has: {known}")
    kind = type(spec.default)
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ModelError(f"parameter {name}: {text!r} is not a {kind.__name__}") from None


def _module_from(path: Path) -> ModuleType:
    name = f"windtunnel_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} cannot be imported: {told(error)}") from error
    return module


def _model_in(module: ModuleType, name: str) -> type[Model]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Model) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ModelError(f"{name} defines {len(found)} models; a file holds exactly one class derived from Model")
    return found[0]
