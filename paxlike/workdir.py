"""The folder of one run: its configuration, and what happens on the second launch.

`config.json` holds the whole experiment, so that a run can be resumed or read back without its
source. A launch with another configuration says which paths differ and stops, unless the difference
cannot change what has been learnt so far. Free of JAX.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from paxlike.config import Experiment
from paxlike.serialization import from_json, to_json

CONFIG = "config.json"
SCHEMA = 1

OnChange = Literal["stop", "take_new"]

# Paths (and all below them) whose change leaves a run what it is: names, layout and execution (the
# checkpoint is restored onto any mesh), what is written and when, how text is sampled, and how long
# the run is; a schedule that decays towards `num_steps` then follows the new length.
FREE_TO_CHANGE = (
    "name", "description", "parallel", "inference", "train.num_steps", "train.log_every",
    "train.eval_every", "train.eval_steps", "train.checkpoint_every", "train.keep_checkpoints",
    "train.on_bad_step", "train.spike_factor", "train.max_bad_steps", "train.accumulation_steps",
)  # fmt: skip


def prepare(
    directory: Path, experiment: Experiment, *, trains: bool, on_change: OnChange = "stop"
) -> list[str]:
    """Make the folder of a run, or check that it belongs to this experiment.

    A mode that trains owns `config.json` and renews it; others only read what was trained, so that
    for them just the model must be the same.

    Args:
        directory: the workdir.
        experiment: what is about to run.
        trains: whether the mode changes the parameters.
        on_change: `stop` at a difference that matters, or `take_new`.

    Returns:
        A line for each difference that was accepted.

    Raises:
        ValueError: the experiment differs from the workdir's in what matters.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / CONFIG
    if not path.exists() or (trains and not _has_learnt(directory)):
        save(path, experiment)
        return []
    changes = differences(load(path), experiment)
    matters = {
        where: change
        for where, change in changes.items()
        if (not _within(where, FREE_TO_CHANGE) if trains else _within(where, ("model",)))
    }
    if matters and on_change == "stop":
        raise ValueError(
            f"{path} is of another run: {'; '.join(f'{w}: {c}' for w, c in matters.items())}. "
            "Choose another --workdir, undo the change, or pass --on_config_change=take_new"
        )
    if trains and changes:
        save(path, experiment)
    return [f"{where}: {change}" for where, change in changes.items()] if trains else []


def save(path: Path, experiment: Experiment) -> None:
    """Write an experiment as JSON; a kill at any moment leaves the old file or the new one."""
    document = {"schema": SCHEMA, "experiment": to_json(experiment, Experiment)}
    write_atomically(path, json.dumps(document, indent=2) + "\n")


def load(path: Path) -> Experiment:
    """Read an experiment that `save` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, of another schema, or does not describe an experiment.
    """
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete or repair it") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this version reads schema {SCHEMA}")
    try:
        return from_json(document.get("experiment"), Experiment)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def differences(old: Experiment, new: Experiment) -> dict[str, str]:
    """Path -> "old -> new" for every leaf in which two experiments differ."""
    before, after = leaves(to_json(old, Experiment)), leaves(to_json(new, Experiment))
    return {
        path: f"{_shown(before, path)} -> {_shown(after, path)}"
        for path in dict.fromkeys((*before, *after))
        if _shown(before, path) != _shown(after, path)
    }


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _has_learnt(directory: Path) -> bool:
    """Whether a run got as far as writing something that a resumed one would continue."""
    return any((directory / name).exists() for name in ("checkpoints", "metrics.jsonl"))


def _within(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> value of every leaf of nested JSON objects."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        where: leaf
        for name, item in value.items()
        for where, leaf in leaves(item, f"{path}.{name}" if path else name).items()
    }


def _shown(leaves: dict[str, Any], path: str) -> str:
    return json.dumps(leaves[path]) if path in leaves else "(absent)"
