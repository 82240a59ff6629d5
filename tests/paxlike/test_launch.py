"""Starting JAX: platform and virtual devices are chosen once, and a bad environment is named."""

import os
import subprocess
import sys

import pytest

from paxlike import launch


def started(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, with none of this one's JAX settings."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TPU_"))
    }
    return subprocess.run(
        [sys.executable, "-c", f"from paxlike import launch\n{code}"],
        env=clean | environment,
        capture_output=True,
        text=True,
    )


def devices_of(call: str, **environment: str) -> str:
    done = started(f"{call}\nimport jax; print(jax.device_count())", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("call", "environment", "count"),
    [
        ("launch.start(6)", CPU, "6"),
        ("launch.start(6, target='cpu:4')", {}, "4"),
        ("import jax; launch.start(3)", CPU, "3"),  # a notebook has imported JAX already
        (
            "launch.start(6)",
            CPU | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            "2",
        ),
        ("launch.start(512, target='v5e:16x16')", {}, "512"),
    ],
)
def test_virtual_devices(call, environment, count):
    assert devices_of(call, **environment) == count


def test_a_compile_target_keeps_libtpu_quiet_and_the_cpu():
    code = (
        "launch.start(1, target='v5e:4x4')\nimport os, jax\n"
        "print(os.environ['TPU_SKIP_MDS_QUERY'], jax.default_backend())"
    )
    assert started(code).stdout.split() == ["1", "cpu"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"XLA_FLAGS": "–-xla_dump_to=x"}, "U+2013"),
        ({"XLA_FLAGS": "-xla_dump_to=x"}, "expected --name=value"),
        ({"JAX_PLATFORMS": "сpu"}, "U+0441"),
    ],
)
def test_a_bad_environment_is_named_before_xla_aborts(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError) as info:
            launch.start(1)
        assert said in str(info.value) and name in str(info.value)


@pytest.mark.parametrize("target", ["cpu", "cpu:", "cpu:0", "cpu:x", "cpu:8x8", "cpu：8"])
def test_a_bad_cpu_target_is_refused(target):
    with pytest.raises(ValueError, match="expected cpu:<devices>"):
        launch.cpu_target(target)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"num_processes": 2}, "give all three"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "host:port"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "process_id is 2"),
    ],
)
def test_a_bad_description_of_processes_is_refused(description, said):
    with pytest.raises(ValueError, match=said):
        launch.Processes(**description)


def test_no_cluster_is_said():
    done = started("launch.start(1, processes=launch.Processes())", **CPU)
    assert done.returncode == 1
    assert "no cluster was detected" in done.stderr


def test_two_processes_share_the_devices():
    code = """
import sys
rank = int(sys.argv[1])
launch.start(4, processes=launch.Processes(
    coordinator="localhost:{port}", num_processes=2, process_id=rank))
import jax
print(jax.device_count(), jax.local_device_count(), launch.is_first_process())
"""
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        code = code.replace("{port}", str(free.getsockname()[1]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"from paxlike import launch\n{code}", str(rank)],
            env=clean | CPU,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [rank.communicate(timeout=120) for rank in ranks]
    assert [out.split() for out, _ in outs] == [["4", "2", "True"], ["4", "2", "False"]], outs
    assert "process 1 of 2 waits for the others at localhost:" in outs[1][1]
    assert "(this machine only)" in outs[1][1]
