"""Experiments by name.

`@register` marks a function of no arguments that returns an `Experiment`; its name is the
experiment's, and the first line of its docstring the description. The modules
`experiments/<folder>/config.py` are found when a name is first asked for, by listing the package:
nothing imports a folder by name, so that deleting one breaks nothing. Free of JAX.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable

from paxlike.config import Experiment
from paxlike.errors import expected_name
from paxlike.serialization import from_json, to_json

Build = Callable[[], Experiment]

_builds: dict[str, Build] = {}


def register(build: Build) -> Build:
    """Register an experiment under its function's name.

    Args:
        build: a function of no arguments; its docstring's first line describes the experiment.

    Returns:
        The function, whose experiments carry the name and the description.

    Raises:
        ValueError: another module took the name, or the function has no docstring; when it is
            called, a field is not of its declared type.
    """
    name = build.__name__
    description = (build.__doc__ or "").strip().partition("\n")[0]
    if not description:
        raise ValueError(f"experiment {name!r} has no docstring; its first line describes it")

    @functools.wraps(build)
    def named() -> Experiment:
        experiment = dataclasses.replace(build(), name=name, description=description)
        # There and back checks each field against its declared type, and that a run can restore it.
        return from_json(to_json(experiment, Experiment), Experiment)

    taken = _builds.get(name)
    # The same module may register again: it was reloaded, or a notebook's cell was run twice.
    if taken is not None and taken.__module__ != build.__module__:
        raise ValueError(
            f"experiment {name!r} is registered by {taken.__module__} and by {build.__module__}; "
            "rename one of the two functions"
        )
    _builds[name] = named
    return named


def descriptions() -> dict[str, str]:
    """One line for each experiment, in alphabetical order of the names."""
    _discover()
    return {
        name: (_builds[name].__doc__ or "").strip().partition("\n")[0] for name in sorted(_builds)
    }


def build(name: str) -> Experiment:
    """Build an experiment by name.

    Raises:
        ValueError: unknown name; the message lists near matches and all names.
    """
    _discover()
    if name not in _builds:
        raise ValueError(expected_name("experiment", name, sorted(_builds)))
    return _builds[name]()


@functools.cache
def _discover() -> None:
    """Import each `experiments/<folder>/config.py`, which registers what it declares."""
    package = importlib.import_module("experiments")
    for folder in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
        module = f"experiments.{folder.name}.config"
        if folder.ispkg and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
