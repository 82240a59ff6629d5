"""Rows are looked up where they lie: values that encode their place, compared exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.embedding import lookup
from meshes.presets import DP, FSDP_RULES, TP
from tests.helpers import on_mesh

V, D, B, T = 16, 8, 4, 8
# Row r, column c holds 100 r + c.
TABLE = (100 * np.arange(V)[:, None] + np.arange(D)).astype(np.float32)
IDS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)


def looked_up(par, ids: np.ndarray = IDS, dtype=jnp.float32) -> jax.Array:
    placed = jax.device_put(ids, jax.NamedSharding(par.mesh, par.spec(("act_batch", "act_seq"))))
    values = jax.device_put(TABLE, jax.NamedSharding(par.mesh, par.spec(("vocab", "embed"))))

    @jax.jit
    def read(values, ids):
        return lookup(nnx.Param(values, out_sharding=("vocab", "embed")), ids, dtype)

    return read(values, placed)


@pytest.mark.parametrize(
    "rules, axes",
    [
        ("dp", dict()),
        ("dp", dict(data=2, seq=2)),
        ("fsdp", dict(fsdp=4)),
        ("tp", dict(tensor=8)),
        ("megatron_sp", dict(seq=2, tensor=4)),
        ("fsdp_sp", dict(seq=2, fsdp=2, tensor=2)),
        (TP.replace(vocab=("pipeline", "tensor")), dict(pipeline=2, tensor=4)),
    ],
)
def test_each_token_reads_its_row(rules, axes):
    with on_mesh(rules, **axes) as par:
        x = looked_up(par)
        expected = par.spec(("act_batch", "act_residual_seq", "act_embed"))
        assert x.sharding.is_equivalent_to(jax.NamedSharding(par.mesh, expected), 3)
    np.testing.assert_array_equal(x, TABLE[IDS])


def test_ids_outside_the_table():
    """As documented: the last row, or zeros where no device holds the row."""
    ids = np.full((B, T), V, np.int32)
    with on_mesh("dp", data=2) as par:
        np.testing.assert_array_equal(np.asarray(looked_up(par, ids))[0, 0], TABLE[-1])
    with on_mesh("tp", tensor=2) as par:
        assert not np.asarray(looked_up(par, ids)).any()


@pytest.mark.parametrize(
    "rules, axes, tokens",
    [
        (FSDP_RULES.replace(vocab="fsdp", embed=None), dict(fsdp=2), "act_batch"),
        (DP.replace(vocab="seq"), dict(seq=2), "act_seq"),
        (TP.replace(vocab=("tensor", "data")), dict(data=2, tensor=2), "act_batch"),
    ],
)
def test_devices_of_other_tokens_cannot_share_a_vocabulary(rules, axes, tokens):
    """Class of complaints: a sum over an axis that mixes different tokens, and a wrong loss."""
    with on_mesh(rules, **axes) as par:
        with pytest.raises(ValueError, match=f"'vocab' and '{tokens}' both map to .* map 'embed'"):
            looked_up(par)


def test_batch_that_the_mesh_does_not_divide():
    with on_mesh("dp", data=8):
        with pytest.raises(ValueError, match="tokens: dimension 'act_batch' of size 4 .* data=8"):
            lookup(nnx.Param(TABLE, out_sharding=("vocab", "embed")), jnp.asarray(IDS), jnp.float32)
