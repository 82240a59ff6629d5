"""The cache: what is read token by token is what was read at once, padding aside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.tokens import Cache, Tokens
from meshes.presets import for_generation, preset
from paxlike.model import Model
from tests.helpers import TINY, disturbed, on_mesh, tiny

B, K, S, H = 2, 2, 8, 4


LAYERS, LAYER = 3, 1


def empty() -> Cache:
    return Cache.empty((LAYERS, B, K, S, H), jnp.dtype("float32"))


def written(cache: Cache, start: list[int], real: list[int], length: int, value: float) -> Cache:
    """Write `length` tokens a row from its start on, of which the first `real` are no padding."""
    steps = np.arange(length, dtype=np.int32)
    positions = np.asarray(start, np.int32)[:, None] + steps
    segments = (steps < np.asarray(real)[:, None]).astype(np.int32)
    k = jnp.asarray(value + 10 * positions, jnp.float32)[:, None, :, None] * jnp.ones(
        (B, K, length, H)
    )
    tokens = Tokens.of(tiny(position="none"), jnp.asarray(positions), jnp.asarray(segments))

    @jax.jit
    def write(cache, layer):
        return cache.seat(tokens).extend(layer, k, -k, tokens)

    return write(cache, LAYER)


def test_rows_are_written_at_their_own_positions():
    with on_mesh(), jax.numpy_rank_promotion("allow"):
        cache = written(empty(), [0, 3], [4, 4], 4, 1.0)
    assert cache.segments_BS.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert cache.k_LBKSH[LAYER, 1, 0, :, 0].tolist() == [0, 0, 0, 31, 41, 51, 61, 0]
    assert cache.positions_BS[1].tolist() == [0, 0, 0, 3, 4, 5, 6, 0]
    np.testing.assert_array_equal(cache.v_LBKSH, -cache.k_LBKSH)
    assert not cache.k_LBKSH[0].any() and not cache.k_LBKSH[2].any()


def test_padding_leaves_what_lies_in_its_slots():
    with on_mesh(), jax.numpy_rank_promotion("allow"):
        first = written(empty(), [0, 0], [4, 4], 4, 1.0)
        second = written(first, [1, 2], [1, 0], 3, 5.0)
    assert second.k_LBKSH[LAYER, 0, 0, :4, 0].tolist() == [1, 15, 21, 31]
    np.testing.assert_array_equal(second.k_LBKSH[:, 1], first.k_LBKSH[:, 1])
    np.testing.assert_array_equal(second.segments_BS, first.segments_BS)


def test_a_split_sequence_has_no_cache():
    with on_mesh("dp", seq=2), pytest.raises(ValueError, match="over .'seq',.*for_generation"):
        empty()


def test_a_step_does_not_copy_the_cache():
    """Class of complaints: each new token copies the whole cache."""
    length = 512
    config = tiny(num_layers=4, max_position=length)
    with on_mesh(for_generation(preset("dp"))) as par:
        model = Model(config)
        cache = jax.eval_shape(lambda: model.empty_cache(8, length))
        tokens = jax.NamedSharding(par.mesh, par.spec(("act_batch", "act_seq")))
        one = jax.ShapeDtypeStruct((8, 1), jnp.int32, sharding=tokens)
        last = jax.ShapeDtypeStruct((8,), jnp.int32)
        step = jax.jit(model.extend, donate_argnums=1)
        compiled = step.lower(model.abstract(), cache, one, one, one, last).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 2  # one layer's keys and values of four


@pytest.mark.parametrize(
    "name, axes, changes",
    [
        ("dp", {}, {}),
        ("tp", dict(data=2, tensor=2), dict(window=3, qk_norm=True, position="learned")),
        ("fsdp_sp", dict(seq=2, fsdp=2, tensor=2), {}),
    ],
    ids=["one_device", "split_heads", "split_rows_of_a_sequence_mesh"],
)
def test_decoding_predicts_what_one_pass_predicts(name, axes, changes):
    """Class of complaints: prefill and decode differ from the full forward pass."""
    config = tiny(**changes)
    random = np.random.default_rng(0)
    rows, length = 4, 12
    ids = random.integers(0, TINY.vocab_size, (rows, length)).astype(np.int32)
    positions = np.repeat(np.arange(length, dtype=np.int32)[None], rows, 0)
    prompt = np.asarray([5, 7, 3, 7], np.int32)
    everyone = np.arange(rows)
    with on_mesh(for_generation(preset(name)), **axes) as par:
        model = Model(config)
        params = disturbed(model.init(jax.random.key(0)))
        sharding = jax.NamedSharding(par.mesh, par.spec(("act_batch", "act_seq")))
        row_sharding = jax.NamedSharding(par.mesh, par.spec(("act_batch",)))
        put = lambda x: jax.device_put(np.asarray(x, np.int32), sharding)
        put_row = lambda x: jax.device_put(np.asarray(x, np.int32), row_sharding)

        @jax.jit
        def at_once(params, ids, positions, segments):
            decoder = model.bind(params)
            return decoder.logits(decoder(ids, positions, segments)[0])

        expected = np.asarray(at_once(params, put(ids), put(positions), put(np.ones_like(ids))))
        extend = jax.jit(model.extend)
        cache = jax.jit(lambda: model.empty_cache(rows, length))()
        real = np.arange(7)[None] < prompt[:, None]
        logits, cache = extend(
            params, cache, put(ids[:, :7]), put(positions[:, :7]), put(real), put_row(prompt - 1)
        )
        np.testing.assert_allclose(logits, expected[everyone, prompt - 1], rtol=1e-4, atol=1e-4)
        for step in range(3):
            now = prompt + step
            logits, cache = extend(
                params, cache, put(ids[everyone, now][:, None]), put(now[:, None]),
                put(np.ones((rows, 1))), put_row(np.zeros(rows)),
            )  # fmt: skip
            np.testing.assert_allclose(logits, expected[everyone, now], rtol=1e-4, atol=1e-4)
