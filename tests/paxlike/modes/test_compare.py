"""Several experiments in one table, and one against an earlier report."""

import dataclasses

import pytest

from meshes.axes import MeshShape
from paxlike import main
from paxlike.modes.compare import compare
from paxlike.modes.compile import compile_
from paxlike.report import Report
from tests.paxlike.modes.test_compile import FSDP_TP, small


def named(experiment, name):
    return dataclasses.replace(experiment, name=name)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compared")
    experiments = named(FSDP_TP, "one"), named(small(MeshShape(data=8), "dp"), "two")
    return workdir, compare(experiments, workdir, target="cpu:8", quiet=True)


def test_a_line_each(compared):
    workdir, report = compared
    one, two = report.compared
    assert (one.experiment, two.experiment) == ("one", "two")
    assert one.total_bytes < two.total_bytes, "sharded parameters take less"
    assert one.step_seconds > 0 and two.mfu > 0 and one.sent_bytes > 0
    alone = Report.read(workdir / "two")
    assert two.step_seconds == alone.predicted.step_seconds
    assert (workdir / "comparison.png").read_bytes().startswith(b"\x89PNG")
    text = report.markdown()
    assert "| one |" in text and "| two |" in text
    report.write(workdir)
    assert Report.read(workdir) == report


def test_names_differ(tmp_path):
    with pytest.raises(ValueError, match="expected each name once"):
        compare([FSDP_TP, FSDP_TP], tmp_path, target="cpu:8")


def test_the_one_that_fails_is_named(tmp_path):
    wide = named(small(MeshShape(data=16), "dp"), "wide")
    with pytest.raises(ValueError, match="experiment wide: mesh .*16"):
        compare([wide, FSDP_TP], tmp_path, target="cpu:8", quiet=True)


def test_against_an_earlier_report(compared, tmp_path):
    workdir, _ = compared
    again = compile_(FSDP_TP, tmp_path, target="cpu:8", against=workdir / "one", quiet=True)
    assert again.changes == () and "Nothing changed" in again.notes[-1]
    other = compile_(FSDP_TP, tmp_path, target="cpu:8", against=workdir / "two", quiet=True)
    assert "## Changes" in other.markdown()
    sections = {change.section for change in other.changes}
    assert {"collectives", "memory", "predicted"} <= sections


def test_against_nothing(tmp_path):
    with pytest.raises(ValueError, match="has no report of compile mode; run"):
        compile_(FSDP_TP, tmp_path, target="cpu:8", against=tmp_path / "none")


def test_other_modes_take_one(tmp_path, capsys):
    arguments = ["--experiment=quickstart,lm_100m", "--mode=eval", f"--workdir={tmp_path}"]
    assert main.main(["paxlike", *arguments]) == 2
    assert "takes one; modes that compare several: compile" in capsys.readouterr().err
