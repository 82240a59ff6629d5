"""The house's arrows: meshes <- layers <- paxlike <- experiments, read from the source."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("meshes", "layers", "paxlike", "experiments")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which package is meant"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def back_edges(package: str, source: str) -> set[str]:
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    return imported(ast.parse(source)) & set(PACKAGES) - set(allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    assert not back_edges(package, path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_a_back_edge_is_seen():
    assert back_edges("layers", "def f():\n    from paxlike import config") == {"paxlike"}
    assert back_edges("paxlike", "import experiments.lm") == {"experiments"}
    assert not back_edges("experiments", "import paxlike.config")


@pytest.mark.parametrize(
    "folder", [path.parent.name for path in sorted((ROOT / "experiments").glob("*/config.py"))]
)
def test_no_experiment_imports_another(folder):
    """Except lm, the base models that papers start from: any other folder can be deleted."""
    for path in (ROOT / "experiments" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments."):
                assert node.module.split(".")[1] in (folder, "lm"), f"{path}: {node.module}"


def test_listing_needs_no_jax():
    code = (
        "import sys, paxlike.main\n"
        "from paxlike import registry\n"
        "for name in registry.descriptions(): registry.build(name)\n"
        "loaded = {'jax', 'flax', 'optax', 'orbax', 'grain', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
