"""The loop: resuming, signals, bad steps, failing saves, and what is written down."""

import dataclasses
import itertools
import json
import signal
import sys
import time
import types

import jax
import numpy as np
import pytest

from meshes.axes import MeshShape
from meshes.hardware import CATALOGUE
from paxlike import checkpoint
from paxlike.analysis import xprof
from paxlike.checkpoint import CheckpointError, Checkpoints
from paxlike.config import InferenceConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.model import Model
from paxlike.modes.evaluate import evaluate
from paxlike.modes.train import train
from paxlike.runtime import runtime
from paxlike.training import loop
from paxlike.training.config import OptimizerConfig
from paxlike.training.feed import Feed
from paxlike.training.interrupt import Interrupt
from paxlike.training.loop import BadStepError
from paxlike.training.metrics import FILE, MetricLog, read_metrics
from paxlike.training.state import abstract_state, optimizer_of
from tests.paxlike.training.tiny import experiment

TIMING = ("step_seconds", "tokens_per_second")


def rows(workdir):
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_metrics(workdir)]


def final_arrays(config, workdir):
    with runtime(config), Checkpoints(workdir / "checkpoints") as checkpoints:
        model = Model(config.model)
        abstract = abstract_state(model, optimizer_of(model, config), config)
        restored = checkpoints.restore(abstract)
        return restored.step, jax.tree.map(np.asarray, restored.tree)


def after_batch(monkeypatch, number, action):
    """Do something to the batch that is fed as the `number`th."""
    fed, feed = [0], Feed.__call__

    def call(self, batch):
        fed[0] += 1
        return feed(self, (action(batch) if fed[0] == number else None) or batch)

    monkeypatch.setattr(Feed, "__call__", call)


def terminate(batch):
    signal.raise_signal(signal.SIGTERM)


def test_interrupted_run_goes_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    config = experiment(eval_every=4, eval_steps=2, ema_decay=0.9)
    train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        after_batch(patch, 6, terminate)
        report = train(config, tmp_path / "parts")
    said = capsys.readouterr().out
    assert "stopped by SIGTERM after step" in said and "run the same command again" in said
    assert "Stopped by SIGTERM" in report.notes[0]
    assert rows(tmp_path / "parts")[-1]["step"] < 12
    train(config, tmp_path / "parts", quiet=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    step, whole = final_arrays(config, tmp_path / "whole")
    assert step == 12
    jax.tree.map(np.testing.assert_array_equal, final_arrays(config, tmp_path / "parts")[1], whole)


def test_signal_during_evaluation_is_obeyed(tmp_path, monkeypatch):
    config = experiment(eval_every=4, eval_steps=6)
    train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        # Five batches are read for training (one ahead), then come those of the evaluation.
        after_batch(patch, 7, terminate)
        train(config, tmp_path / "parts", quiet=True)
    assert [row for row in rows(tmp_path / "parts") if "eval_loss" in row] == []
    assert final_arrays(config, tmp_path / "parts")[0] == 4
    train(config, tmp_path / "parts", quiet=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_second_signal_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested() and interrupt.name == "SIGINT"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_on_another_mesh(tmp_path):
    first, whole = experiment(num_steps=12, checkpoint_every=6), tmp_path / "whole"
    train(first, whole, quiet=True)
    for path in (whole / "checkpoints").glob("*12"):
        path.rename(tmp_path / "last")
    expected = rows(whole)
    other = experiment(
        mesh=MeshShape(data=4, seq=2), parallel={"zero1": True}, num_steps=12, checkpoint_every=6
    )
    train(other, whole, quiet=True)
    actual = rows(whole)
    assert actual[:6] == expected[:6] and len(actual) == 12
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


def poison(batch):
    return batch | {"loss_weights": batch["loss_weights"] * np.float32(np.nan)}


def test_bad_step_stops_and_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    config = experiment(checkpoint_every=4)
    with monkeypatch.context() as patch:
        after_batch(patch, 7, poison)
        with pytest.raises(BadStepError, match="step 7 is bad: loss nan.*checkpoint is of step 4"):
            train(config, tmp_path, quiet=True)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]
    train(config, tmp_path, quiet=True)
    assert all(np.isfinite(row["loss"]) for row in rows(tmp_path)) and len(rows(tmp_path)) == 12


def test_bad_step_at_a_checkpoint_is_not_saved(tmp_path, monkeypatch):
    after_batch(monkeypatch, 4, poison)
    with pytest.raises(BadStepError, match="none: nothing was saved yet"):
        train(experiment(checkpoint_every=4), tmp_path, quiet=True)
    assert Checkpoints(tmp_path / "checkpoints").steps() == []


def test_bad_steps_are_skipped_until_there_are_too_many(tmp_path, monkeypatch, capsys):
    config = experiment(on_bad_step="skip", max_bad_steps=3)
    with monkeypatch.context() as patch:
        after_batch(patch, 7, poison)
        report = train(config, tmp_path / "one", quiet=True)
    assert report.results["skipped"] == 1 and np.isfinite(report.results["loss"])
    assert "warning: step 7 is bad" in capsys.readouterr().err
    feed = Feed.__call__
    monkeypatch.setattr(Feed, "__call__", lambda self, batch: feed(self, poison(batch)))
    with pytest.raises(BadStepError, match=r"step 3 is bad.*\(3 in a row\)"):
        train(config, tmp_path / "all", quiet=True)


class Failing:
    def __init__(self, error):
        self.error = error

    def result(self):
        raise self.error


def failing_saves(monkeypatch, error, times):
    """Let the first saves fail in the background."""
    saves, save = [0], checkpoint.ocp.save_async

    def save_async(path, arrays):
        saves[0] += 1
        return Failing(error) if saves[0] <= times else save(path, arrays)

    monkeypatch.setattr(checkpoint.ocp, "save_async", save_async)


def test_full_disk_is_warned_of_and_training_goes_on(tmp_path, monkeypatch, capsys):
    failing_saves(monkeypatch, OSError(28, "No space left on device"), times=2)
    train(experiment(checkpoint_every=4), tmp_path, quiet=True)
    assert capsys.readouterr().err.count("THE DISK IS FULL") == 2
    assert Checkpoints(tmp_path / "checkpoints").steps() == [12]


def test_last_checkpoint_that_fails_is_an_error(tmp_path, monkeypatch):
    failing_saves(monkeypatch, OSError(28, "No space left on device"), times=3)
    with pytest.raises(CheckpointError, match="00000012 could not be written"):
        train(experiment(), tmp_path, quiet=True)


def test_other_failure_of_a_save_stops_the_run(tmp_path, monkeypatch):
    failing_saves(monkeypatch, ValueError("INTERNAL: gone"), times=1)
    with pytest.raises(CheckpointError, match="00000004 could not be written: INTERNAL: gone"):
        train(experiment(checkpoint_every=4, num_steps=100), tmp_path, quiet=True)
    assert len(rows(tmp_path)) < 20


def test_finished_run_has_nothing_to_do(tmp_path):
    config = experiment()
    train(config, tmp_path, quiet=True)
    before = rows(tmp_path)
    report = train(config, tmp_path, quiet=True)
    assert rows(tmp_path) == before and report.measured is None
    assert report.results["loss"] == before[-1]["loss"]


def test_loop_traces_the_model_once(tmp_path, monkeypatch):
    traces, loss_sum = [0], Model.loss_sum

    def counted(self, params, batch):
        traces[0] += 1
        return loss_sum(self, params, batch)

    monkeypatch.setattr(Model, "loss_sum", counted)
    train(experiment(checkpoint_every=3), tmp_path, quiet=True)
    assert traces[0] == 1


def test_vocabulary_too_small_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a text " * 1000)
    source = SourceConfig(kind="text", paths=(str(tmp_path / "*.txt"),), separator=" ")
    data = DataConfig(source=source, sequence_length=32)
    with pytest.raises(ValueError, match="model.vocab_size is 64, but the tokenizer has 25"):
        train(dataclasses.replace(experiment(), data=data), tmp_path, quiet=True)


def test_report_and_events(tmp_path):
    report = train(experiment(), tmp_path, quiet=True)
    assert report.measured.step_seconds.n == 11
    tokens = 8 * 32
    assert report.measured.tokens_per_second == tokens / report.measured.step_seconds.median
    assert report.results["compile_seconds"] > 0
    assert report.results["data"]["split"] == "train"
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_metrics_beyond_the_restored_step_are_dropped(tmp_path):
    lines = [json.dumps({"step": n, "loss": n / 7}) for n in (1, 2, 3)]
    (tmp_path / FILE).write_text("\n".join(lines) + '\n{"step": 4, "lo')
    with MetricLog(tmp_path, 2) as log:
        assert log.newest() == {"step": 2, "loss": 2 / 7} and log.value(2, "eval_loss") is None
        log.write(3, {"eval_loss": 0.1})
        assert log.value(3, "eval_loss") == 0.1
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1 / 7}, {"step": 2, "loss": 2 / 7}, {"step": 3, "eval_loss": 0.1}
    ]  # fmt: skip


def test_profile_covers_its_window(tmp_path):
    report = train(
        experiment(num_steps=6), tmp_path, quiet=True, profile_first_step=3, profile_steps=2
    )
    if xprof.can_read():
        parts = report.measured.breakdown
        assert {"matmul", "other"} <= set(parts.by_class_seconds)
        assert any(scope.startswith("layer.") for scope in parts.by_scope_seconds)
        assert "| class matmul |" in report.markdown()
    else:
        assert any("aborts the process" in note for note in report.notes)
    assert (tmp_path / "trace" / "step.hlo.txt").read_text().startswith("HloModule")
    assert (tmp_path / "trace" / "memory.prof").exists()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    with pytest.raises(ValueError, match="first step is 0"):
        train(experiment(), tmp_path, profile_first_step=0)


def test_outcome_state_is_the_saved_one(tmp_path):
    config = experiment()
    with runtime(config):
        outcome = loop.run(Model(config.model), config, tmp_path, quiet=True)
    assert outcome.step == 12
    jax.tree.map(np.testing.assert_array_equal, outcome.state, final_arrays(config, tmp_path)[1])


def test_the_best_checkpoints_are_kept_and_found(tmp_path):
    """A learning rate that grows too large: the best evaluation is not the last."""
    config = experiment(
        optimizer=OptimizerConfig(learning_rate=3.0, warmup_steps=10, clip_norm=None),
        eval_every=2, checkpoint_every=2, keep_checkpoints=1, keep_best_checkpoints=2,
    )  # fmt: skip
    train(config, tmp_path, quiet=True)
    losses = {r["step"]: r["eval_loss"] for r in rows(tmp_path) if "eval_loss" in r and r["step"]}
    best = sorted(losses, key=losses.__getitem__)
    assert best[0] != 12
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.ranked() == [n for n in best if n in {*best[:2], 12}]
        assert checkpoints.steps() == sorted({*best[:2], 12})
    for which, step in (("best", best[0]), ("newest", 12), (str(best[1]), best[1])):
        inference = InferenceConfig(checkpoint=which)
        report = evaluate(dataclasses.replace(config, inference=inference), tmp_path)
        assert report.results["step"] == step
    inference = InferenceConfig(checkpoint="3")
    with pytest.raises(ValueError, match=r"no checkpoint '3' .* there are steps \["):
        evaluate(dataclasses.replace(config, inference=inference), tmp_path)


def test_checkpoints_by_the_clock(tmp_path, monkeypatch):
    """A clock that advances 20 s whenever it is read: a save every 4 steps."""
    clock = itertools.count(step=20)
    patched = types.SimpleNamespace(
        monotonic=lambda: float(next(clock)), perf_counter=time.perf_counter
    )
    monkeypatch.setattr(loop, "time", patched)
    train(experiment(checkpoint_minutes=1.0, keep_checkpoints=9), tmp_path, quiet=True)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4, 8, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(keep_best_checkpoints=1, checkpoint_every=4), "every 4 steps and evaluated every 0"),
        (dict(keep_best_checkpoints=1, checkpoint_every=4, eval_every=3), "a multiple of"),
        (dict(checkpoint_minutes=1.0, log_every=0), "log_every is 0"),
        (dict(checkpoint_minutes=-1.0), "checkpoint_minutes is -1.0"),
    ],
)
def test_checkpoint_settings_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        experiment(**changes)


def test_model_flops_utilisation_where_the_peak_is_known(tmp_path, monkeypatch):
    """A step at the peak of eight such devices would take mfu * step_seconds."""
    monkeypatch.setattr(loop, "identify", lambda kind: CATALOGUE["h100"])
    config = experiment()
    train(config, tmp_path, quiet=True)
    tokens = 8 * 32
    weights = 2 * (16 * (4 + 2 + 2) * 8 + 32 * 16 + 3 * 16 * 32) + 16 * 64
    attention = 2 * (2 * 4 * 8 * 32 / 2)  # two products, half the sequence on average
    flops = 6 * tokens * (weights + attention)
    timed = [row for row in read_metrics(tmp_path) if "step_seconds" in row]
    assert len(timed) == 11
    for row in timed:
        ideal = flops / (8 * CATALOGUE["h100"].bf16_flops / 2)  # TF32: half of bfloat16
        # The count takes norms for matrices: a rounding error, except in so small a model.
        assert row["mfu"] * row["step_seconds"] == pytest.approx(ideal, rel=0.02)


def test_weights_and_biases_get_every_row(tmp_path, monkeypatch):
    """The package is an optional extra: what it is told is recorded."""
    said = []

    class Run:
        def log(self, values, step):
            said.append({"step": step, **values})

        def finish(self, exit_code):
            said.append(exit_code)

    def init(**arguments):
        said.append(arguments)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = experiment(num_steps=3, wandb_project="layouts")
    train(config, tmp_path / "run", quiet=True)
    first, *logged, code = said
    assert (first["project"], first["name"], first["resume"]) == ("layouts", "run", "allow")
    assert logged == read_metrics(tmp_path / "run") and code == 0
    said.clear()
    train(dataclasses.replace(config, train=longer(config, 4)), tmp_path / "run", quiet=True)
    assert said[0]["id"] == first["id"] and [row["step"] for row in said[1:-1]] == [4]


def test_weights_and_biases_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="train.wandb_project needs .* pip install wandb"):
        train(experiment(wandb_project="layouts"), tmp_path, quiet=True)


def longer(config, num_steps):
    return dataclasses.replace(config.train, num_steps=num_steps)
