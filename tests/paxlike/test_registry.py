"""Experiments by name: discovery, duplicates, independence of the folders."""

import subprocess
import sys

import pytest

from paxlike import registry
from paxlike.config import Experiment


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    registry.descriptions()
    monkeypatch.setattr(registry, "_builds", dict(registry._builds))


def declare(name: str, module: str, doc: str | None = "One line.") -> None:
    def build() -> Experiment:
        return registry.build("quickstart")

    build.__name__, build.__doc__, build.__module__ = name, doc, module
    registry.register(build)


def test_the_function_names_and_describes_the_experiment():
    declare("variant", "experiments.a.config", "First line.\n\nMore.")
    variant = registry.build("variant")
    assert (variant.name, variant.description) == ("variant", "First line.")
    assert variant.model == registry.build("quickstart").model
    assert registry.descriptions()["variant"] == "First line."


def test_two_modules_cannot_share_a_name():
    declare("variant", "experiments.a.config")
    declare("variant", "experiments.a.config")  # reloaded
    with pytest.raises(ValueError, match=r"by experiments\.a\.config and by experiments\.b"):
        declare("variant", "experiments.b.config")


def test_an_experiment_needs_a_description():
    with pytest.raises(ValueError, match="'variant' has no docstring"):
        declare("variant", "experiments.a.config", None)


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(ValueError, match="did you mean llama3_70b"):
        registry.build("llama_3_70b")


def test_deleting_a_folder_breaks_nothing(tmp_path):
    """The package is discovered by listing it: an empty one has no experiments."""
    (tmp_path / "experiments" / "notes").mkdir(parents=True)
    for folder in ("experiments", "experiments/notes"):
        (tmp_path / folder / "__init__.py").write_text("")
    code = "from paxlike import registry; assert registry.descriptions() == {}"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import experiments; "
    subprocess.run([sys.executable, "-c", path + code], check=True)
