"""The go/no-go rule tried on compiled programs: the closed form against XLA over a grid of layouts.

The paper ran 454 layouts and saw none run out of memory whose estimate was below 80 % of a device.
Here each layout's training step is compiled for eight CPU devices, and the compiler's peak takes
the place of the device's: for any capacity it says which layouts would have fitted. Everything is
float32, because XLA on CPUs widens bfloat16; layers keep the twelve tensors that the closed form
counts, whatever else the compiler needs.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence

import jax

from layers.config import FLOAT32, ModelConfig
from meshes.axes import MeshShape
from paxlike.analysis.memory_model import Estimate, Layout, MicroBatch, Widths, estimate, verdict
from paxlike.compilation import compile_step, inputs
from paxlike.config import Experiment, ParallelConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.model import build_model
from paxlike.runtime import runtime
from paxlike.training.config import TrainConfig

MODEL = ModelConfig(
    vocab_size=256, num_layers=4, embed_dim=64, num_heads=8, num_kv_heads=4, head_dim=8,
    mlp_dim=192, dtypes=FLOAT32,
)  # fmt: skip

KEEP_TWELVE = (
    "named:attention_input,query,key,value,attention_context,mlp_residual,mlp_input,mlp_gate,"
    "mlp_up,mlp_activation,mlp_hidden"
)

# float32 parameters and gradients, two moments and no master copy.
WIDTHS = Widths(params=4, grads=4, optimizer=8, compute=4, softmax=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One layout: what was said, and what the compiler needs on each device.

    Attributes:
        name: its rules, axes, policy and tokens.
        estimate: of the closed form.
        peak_bytes: arguments, results and temporaries.
        temporary_bytes: of these, the temporaries.
    """

    name: str
    estimate: Estimate
    peak_bytes: int
    temporary_bytes: int


def layouts() -> Iterator[Experiment]:
    """Twenty-four training steps of one small model on eight devices."""
    meshes = {
        "dp": {"data": 8},
        "fsdp": {"fsdp": 8},
        "tp": {"data": 2, "tensor": 4},
        "megatron_sp": {"data": 2, "seq": 2, "tensor": 2},
        "fsdp_tp": {"fsdp": 4, "tensor": 2},
        "fsdp_sp": {"fsdp": 2, "seq": 2, "tensor": 2},
    }
    work = ((KEEP_TWELVE, 8, 64), (KEEP_TWELVE, 16, 256), (KEEP_TWELVE, 64, 128), ("full", 32, 128))
    for (rules, axes), (remat, rows, length) in itertools.product(meshes.items(), work):
        yield Experiment(
            name=f"{rules} {axes} {remat.partition(':')[0]} {rows}x{length}",
            model=MODEL,
            parallel=ParallelConfig(mesh=MeshShape(**axes), rules=rules, remat=remat),
            data=DataConfig(
                source=SourceConfig(kind="synthetic", vocab_size=MODEL.vocab_size),
                sequence_length=length,
            ),
            train=TrainConfig(global_batch_size=rows),
        )


def estimate_of(experiment: Experiment) -> Estimate:
    """The closed form of one of these layouts."""
    parallel = experiment.parallel
    mesh = parallel.mesh
    layout = Layout(mesh=mesh, rules=parallel.rule_table, remat=parallel.remat)
    replicas = mesh.data * mesh.expert * mesh.fsdp
    batch = MicroBatch(
        sequences=experiment.train.global_batch_size // replicas,
        length=experiment.data.sequence_length,
    )
    return estimate(experiment.model, layout, batch, WIDTHS)


def measure(experiment: Experiment) -> Measured:
    """Compile one layout's training step; nothing is allocated."""
    with runtime(experiment):
        program = compile_step(inputs(experiment, build_model(experiment), "train"))
    return Measured(
        name=experiment.name,
        estimate=estimate_of(experiment),
        peak_bytes=program.memory["total"] - program.memory.get("code", 0),
        temporary_bytes=program.memory["temporaries"],
    )


def confusion(rows: Sequence[Measured], capacity_bytes: float) -> dict[tuple[str, bool], int]:
    """Number of layouts by (verdict, whether the compiler's peak fits)."""
    table: dict[tuple[str, bool], int] = {}
    for row in rows:
        cell = verdict(row.estimate.total, capacity_bytes), row.peak_bytes <= capacity_bytes
        table[cell] = table.get(cell, 0) + 1
    return table


def rank_correlation(rows: Sequence[Measured]) -> float:
    """Spearman's, of the estimated total with the compiler's temporaries; sizes must differ."""
    sizes = ([row.estimate.total for row in rows], [row.temporary_bytes for row in rows])
    estimates, temporaries = ([sorted(x).index(value) for value in x] for x in sizes)
    return statistics.correlation(estimates, temporaries)


def main() -> None:
    """Print the grid, its rank correlation, and who fits into the median peak as capacity."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [measure(experiment) for experiment in layouts()]
    for row in rows:
        ratio = row.peak_bytes / row.estimate.total
        print(f"{row.name:70} estimate {row.estimate.total:>10,} peak {row.peak_bytes:>10,}"
              f" temp {row.temporary_bytes:>10,} peak/estimate {ratio:.2f}")  # fmt: skip
    print(f"rank correlation of estimate and temporaries: {rank_correlation(rows):.3f}")
    capacity = sorted(row.peak_bytes for row in rows)[len(rows) // 2]
    print(f"capacity {capacity:,} bytes:")
    for (said, fits), count in sorted(confusion(rows, capacity).items()):
        print(f"  {said:4} {'fits' if fits else 'does not fit'}: {count}")


if __name__ == "__main__":
    main()
