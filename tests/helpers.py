"""A tiny model, a batch that is hard to average, and one call that runs both on any mesh.

Programs are compiled once a session (`functools.cache`), because compiling is what tests spend.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator

import jax
import numpy as np

from layers.config import FLOAT32, ModelConfig
from layers.schemes import Schemes
from meshes.axes import MeshShape
from meshes.build import build_mesh
from meshes.context import Parallelism, parallelism
from meshes.presets import preset
from meshes.rules import Rules
from paxlike.model import Model

BATCH, LENGTH = 8, 16

# Wide initial weights: with 0.02, softmaxes of a tiny model are flat, and errors in them invisible.
TINY = ModelConfig(
    vocab_size=48, num_layers=3, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32,
    max_position=LENGTH, init_std=0.25, dtypes=FLOAT32,
)  # fmt: skip


def tiny(**changes: object) -> ModelConfig:
    """The tiny model with other settings."""
    return dataclasses.replace(TINY, **changes)


@functools.cache
def random_batch(packed: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens whose documents, padding and loss weights differ from row to row.

    Packed rows hold up to three documents and end in padding (segment 0, weight 0). Weights are 0,
    1 or 2.5, so that a mean of means, or a count of rows, is not the mean over tokens.
    """
    random = np.random.default_rng(seed)
    shape = (BATCH, LENGTH)
    segments, positions = np.ones(shape, np.int32), np.zeros(shape, np.int32)
    positions[:] = np.arange(LENGTH)
    for row in range(BATCH if packed else 0):
        ends = np.sort(random.choice(np.arange(1, LENGTH + 1), 3, replace=False))
        starts = np.concatenate([[0], ends])
        segments[row] = 0
        positions[row] = 0
        for document, (start, end) in enumerate(zip(starts[:-1], ends, strict=True), 1):
            segments[row, start:end] = document
            positions[row, start:end] = np.arange(end - start)
    weights = random.choice([0, 1, 2.5], shape).astype(np.float32) * (segments > 0)
    return {
        "tokens": random.integers(0, TINY.vocab_size, shape).astype(np.int32),
        "targets": random.integers(0, TINY.vocab_size, shape).astype(np.int32),
        "segment_ids": segments,
        "positions": positions,
        "loss_weights": weights,
    }


def as_rules(rules: str | Rules) -> Rules:
    return preset(rules) if isinstance(rules, str) else rules


@contextlib.contextmanager
def on_mesh(
    rules: str | Rules = "fsdp_tp", schemes: Schemes | None = None, **axes: int
) -> Iterator[Parallelism]:
    """Enter a mesh of these axes, on as many virtual devices as it needs."""
    shape = MeshShape(**axes)
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    with parallelism(mesh, as_rules(rules), schemes or Schemes()) as entered:
        yield entered


def put(par: Parallelism, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Lay a batch out as (act_batch, act_seq)."""
    sharding = jax.NamedSharding(par.mesh, par.spec(("act_batch", "act_seq")))
    return {name: jax.device_put(x, sharding) for name, x in batch.items()}


def by_path(tree: object) -> dict[str, np.ndarray]:
    """Leaves of a tree of parameters by name, such as `layers.attention.query`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path).removesuffix(".value"): np.asarray(x) for path, x in leaves}


def disturbed(params: object) -> object:
    """Add noise to each parameter, the same on every mesh: no bias stays 0, no scale stays 1."""

    def disturb(path: tuple, x: jax.Array) -> jax.Array:
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = 0.1 * np.random.default_rng(seed).standard_normal(x.shape)
        return jax.device_put((np.asarray(x) + noise).astype(x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(disturb, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one evaluation of loss and gradients gave, as host values.

    Attributes:
        loss: the objective, a token.
        metrics: as the model reports them.
        initial: initial parameters by path, undisturbed.
        params: parameters by path at which the loss was taken.
        grads: gradients by path.
        hlo: text of the compiled program.
        mesh: axis name -> size.
    """

    loss: float
    metrics: dict[str, float]
    initial: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    hlo: str
    mesh: dict[str, int]


@functools.cache
def _run(config, rules, schemes, packed, axes) -> Run:
    with on_mesh(rules, schemes, **dict(axes)) as par:
        model = Model(config)
        initial = model.init(jax.random.key(0))
        params = disturbed(initial)
        batch = put(par, random_batch(packed))
        step = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
        compiled = step.lower(params, batch).compile()
        (loss, metrics), grads = compiled(params, batch)
        return Run(
            loss=float(loss),
            metrics={name: float(x) for name, x in metrics.items()},
            initial=by_path(initial),
            params=by_path(params),
            grads=by_path(grads),
            hlo=compiled.as_text(),
            mesh=dict(par.sizes),
        )


def run(
    config: ModelConfig = TINY,
    rules: str | Rules = "fsdp_tp",
    *,
    schemes: Schemes | None = None,
    packed: bool = True,
    **axes: int,
) -> Run:
    """Loss and gradients of a model with disturbed parameters on a mesh; no axes, one device."""
    return _run(config, as_rules(rules), schemes or Schemes(), packed, tuple(sorted(axes.items())))


def largest_error(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> tuple[float, str]:
    """(largest |difference| / largest |value| of one array, its name).

    An array a hundred times smaller than the largest is measured on the scale of that: a bias of
    keys without rotation has gradient 0, because softmax ignores what all scores share.
    """
    assert actual.keys() == expected.keys()
    floor = 0.01 * max(np.abs(wanted).max() for wanted in expected.values())
    errors = []
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        error = np.abs(actual[name].astype(np.float64) - wanted).max()
        errors.append((float(error / max(np.abs(wanted).max(), floor)), name))
    return max(errors)
