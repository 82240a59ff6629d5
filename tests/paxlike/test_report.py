"""Reports: one schema, written and read back, and readable by people."""

import json

import pytest

from paxlike.analysis.liveness import LiveBuffer, Peak
from paxlike.report import (
    Breakdown,
    Claim,
    Collective,
    Compute,
    Measured,
    Memory,
    PeakMemory,
    Predicted,
    Report,
    Spread,
)

LIVE = (
    LiveBuffer(
        bytes=6000, shape="f32[1500]", category="activations", where="head", phase="forward",
        name="dot.1",
    ),
)  # fmt: skip


def full_report(mode: str = "train") -> Report:
    return Report(
        experiment="quickstart",
        mode=mode,
        target="cpu:8",
        memory=Memory(
            per_device_bytes={"params": 1_500_000, "total": 3_000_000},
            capacity_bytes=16 * 10**9,
            fits="safe",
            peak=PeakMemory.of(Peak(bytes=6000, during=("w",), where="head", buffers=LIVE), 5000),
        ),
        collectives=(
            Collective(
                kind="all-reduce", mesh_axes=("data", "seq"), count=8, bytes_per_device=4096,
                group_size=4, payload_bytes=2048, dtype="f32", where="layer.mlp", phase="forward",
                in_loop=True, exact=True,
            ),
        ),
        compute=Compute(flops_per_device=2e12, model_flops=1.5e12, hbm_bytes_per_device=3e9),
        predicted=Predicted(
            step_seconds=0.0123, exposed_communication_seconds=2e-5, mfu=0.43,
            bound_by="compute", basis="compiled schedule + cost model v1",
            breakdown=Breakdown(
                by_scope_seconds={"layer.mlp": 0.012}, by_class_seconds={"matmul": 0.011},
                by_limit_seconds={"compute": 0.0123}, idle_seconds=0.0,
            ),
        ),
        measured=Measured(
            step_seconds=Spread.of([3.0, 1.0, 2.0]), tokens_per_second=12345.6,
            breakdown=Breakdown(
                by_scope_seconds={"layer.mlp": 0.013}, by_class_seconds={"matmul": 0.01},
            ),
        ),
        claims=(
            Claim(
                id="T1", paper_ref="Table 1", statement="half | the bytes", paper_value=0.5,
                our_value=0.51, tolerance=0.05, how="counted", verdict="reproduced",
            ),
        ),
        results={"final_loss": 2.5, "corpus": {"documents": 1234}},
        notes=("A note.",),
        plots=("loss.png",),
    )  # fmt: skip


def test_the_schema_is_that_of_the_design(tmp_path):
    full_report().write(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == 1
    assert {"experiment", "mode", "target", "versions", "date"} <= set(data)
    assert set(data["memory"]) == {"per_device_bytes", "capacity_bytes", "fits", "peak"}
    assert set(data["collectives"][0]) >= {
        "kind", "mesh_axes", "count", "bytes_per_device", "hidden_fraction", "where"
    }  # fmt: skip
    assert data["measured"]["step_seconds"] == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert set(data["claims"][0]) == {
        "id", "paper_ref", "statement", "paper_value", "our_value", "unit", "tolerance", "how",
        "verdict",
    }  # fmt: skip
    assert data["versions"]["jax"]


def test_it_is_read_back(tmp_path):
    report = full_report()
    report.write(tmp_path)
    assert Report.read(tmp_path) == report


def test_only_sections_that_exist(tmp_path):
    Report(experiment="a", mode="eval", target="cpu:1", results={"loss": 1.0}).write(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert not {"memory", "collectives", "claims", "plots", "notes"} & set(data)
    text = (tmp_path / "report.md").read_text()
    assert "## Results" in text and "## Memory" not in text and "## Claims" not in text


def test_the_reader_gets_units():
    text = full_report().markdown()
    for row in (
        "| params | 1.5 MB |", "| capacity | 16 GB |", "| flops per device | 2 TFLOP |",
        "| step | 12.3 ms |", "| exposed communication | 20 us |", "| mfu | 43.0% |",
        "| step median | 2 s |", "| tokens per second | 12,346 tokens/s |",
        "| scope layer.mlp | 12 ms | 13 ms |", "| bound by compute | 12.3 ms | 0 us |",
        "| deviation fraction | 20.0% |", "| of it activations | 6 kB |",
        "| 6 kB | f32[1500] | activations | head | forward | dot.1 |",
        "| corpus documents | 1,234 |", "half \\| the bytes", "| data, seq |", "![loss](loss.png)",
    ):  # fmt: skip
        assert row in text, f"{row}\n{text}"


def test_a_report_of_another_mode_is_kept(tmp_path):
    full_report("train").write(tmp_path)
    full_report("compile").write(tmp_path)
    full_report("compile").write(tmp_path)
    assert Report.read(tmp_path).mode == "compile"
    assert json.loads((tmp_path / "report_train.json").read_text())["mode"] == "train"
    assert (tmp_path / "report_train.md").exists()
    assert not (tmp_path / "report_compile.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 7}', '{"schema": 1}'])
def test_a_damaged_report_is_named(text, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match="report.json is not a report of this version"):
        Report.read(tmp_path)


def test_spread_of_an_even_number():
    assert Spread.of([1.0, 2.0, 4.0, 9.0]) == Spread(median=3.0, min=1.0, max=9.0, n=4)
