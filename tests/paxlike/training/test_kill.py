"""Killed at any moment, also while it saves, a run goes on as if nothing had been."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from paxlike.training.metrics import FILE, read_metrics

ROOT = pathlib.Path(__file__).parents[3]
KILLS, STEPS = 20, 400
MIXED = "data=2,fsdp=2,tensor=2"
TIMING = ("step_seconds", "tokens_per_second")


def launch(workdir, cache, steps=STEPS, *, axes="fsdp=2", devices=2, cluster=()):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    script = pathlib.Path(__file__).with_name("run_tiny.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(workdir), str(steps), axes, *cluster],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return out


def rows(workdir):
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_metrics(workdir)]


def written(workdir):
    file = workdir / FILE
    return file.stat().st_size if file.exists() else 0


def wait_for_rows(process, workdir, number):
    """Wait until this launch has written some rows (a row has about 150 bytes)."""
    while process.poll() is None and not written(workdir):
        time.sleep(0.005)
    start, last = written(workdir), time.monotonic()
    while process.poll() is None and time.monotonic() < last + 60:
        size = written(workdir)
        start = min(start, size)  # resuming drops rows
        if size - start > 150 * number:
            return
        time.sleep(0.002)


def unfinished_saves(workdir):
    folders = [p for p in (workdir / "checkpoints").glob("*") if p.is_dir()]
    return [p for p in folders if not (p / "seal.json").exists()]


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    choose = random.Random(0)
    killed, during_save = tmp_path / "killed", 0
    for number in range(KILLS):
        process = launch(killed, tmp_path / "cache")
        if number % 5 == 4:
            time.sleep(choose.uniform(0, 4))  # starting, restoring or compiling
        else:
            wait_for_rows(process, killed, choose.randrange(1, 12))
            time.sleep(choose.uniform(0, 0.05))
        assert process.poll() is None, process.communicate()[1][-2000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        during_save += bool(unfinished_saves(killed))
    out = finish(launch(killed, tmp_path / "cache"))
    assert during_save >= 3, f"only {during_save} kills hit a save"
    assert f"step {STEPS}/{STEPS}" in out

    whole = tmp_path / "whole"
    finish(launch(whole, tmp_path / "cache"))
    assert rows(killed) == rows(whole)
    assert [row["step"] for row in rows(whole) if "loss" in row] == list(range(1, STEPS + 1))


def test_preemption_signal_saves_and_says_how_to_go_on(tmp_path):
    process = launch(tmp_path / "run", tmp_path / "cache", steps=100)
    wait_for_rows(process, tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert "stopped by SIGTERM after step" in out and "run the same command again" in out
    assert not unfinished_saves(tmp_path / "run")
    reached = rows(tmp_path / "run")[-1]["step"]
    assert f"after step {reached} of 100" in out and reached < 100
    finish(launch(tmp_path / "run", tmp_path / "cache", steps=100))
    finish(launch(tmp_path / "whole", tmp_path / "cache", steps=100))
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def launch_two(workdir, cache, steps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        launch(workdir, cache, steps, axes=MIXED, devices=4, cluster=(address, "2", str(i)))
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_stop_together_and_equal_one(tmp_path):
    run, steps = tmp_path / "run", 40
    processes = launch_two(run, tmp_path / "cache", steps)
    wait_for_rows(processes[0], run, 12)
    processes[1].send_signal(signal.SIGTERM)  # to one of them only
    outs = [finish(process) for process in processes]
    assert "stopped by SIGTERM after step" in outs[0] and "stopped" not in outs[1]
    assert rows(run)[-1]["step"] < steps
    for process in launch_two(run, tmp_path / "cache", steps):
        finish(process)
    finish(launch(tmp_path / "one", tmp_path / "cache", steps, axes=MIXED, devices=8))
    assert [r["step"] for r in rows(run)] == [r["step"] for r in rows(tmp_path / "one")]
    for two, one in zip(rows(run), rows(tmp_path / "one"), strict=True):
        for name in two.keys() & {"loss", "eval_loss"}:
            # Gloo and shared memory add in another order.
            assert two[name] == pytest.approx(one[name], rel=1e-5), two
