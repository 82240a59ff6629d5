"""The framework's training step against the same step by hand: at least 0.97 of its speed."""

import statistics

import jax
import pytest

from meshes.axes import MeshShape
from tests.benchmarks import bare_step, small_step

ROUNDS = 7


@pytest.mark.parametrize(
    ("layout", "rules", "mesh"),
    [("dp", "fsdp_tp", MeshShape()), ("dp", "dp", MeshShape(data=8)),
     ("fsdp", "fsdp", MeshShape(fsdp=8))],
    ids=["1 device", "data 8", "fsdp 8"],
)  # fmt: skip
def test_step_is_as_fast_as_bare_jax(layout: str, rules: str, mesh: MeshShape) -> None:
    step, state, batch = bare_step.build(layout, mesh.num_devices)

    def bare() -> float:
        nonlocal state
        start = small_step.now()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        return small_step.now() - start

    ours = small_step.Runner(small_step.experiment(mesh, rules), mesh.num_devices)
    pairs = [(bare(), ours()) for _ in range(ROUNDS)][1:]
    by_hand, framework = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"\n{mesh.sizes}: by hand {by_hand:.3f} s, framework {framework:.3f} s a step, "
          f"speed ratio {by_hand / framework:.2f}")  # fmt: skip
    assert by_hand / framework >= 0.97
