"""Cross entropy over a split vocabulary, in chunks: against plain numpy, at its extremes too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.loss import Head, cross_entropy
from meshes.presets import FSDP_RULES
from tests.helpers import on_mesh

B, T, D, V = 4, 8, 16, 24
NAMES = ("act_batch", "act_residual_seq", "act_embed"), ("embed", "vocab")


def head(**changes) -> Head:
    settings = dict(
        names=("embed", "vocab"), softcap=None, z_loss=0.0, chunk=0,
        accumulate="float32", reduce="float32",
    )  # fmt: skip
    return Head(**(settings | changes))


def draw(scale: float = 1.0) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    x = random.standard_normal((B, T, D)).astype(np.float32) * scale
    w = random.standard_normal((D, V)).astype(np.float32)
    targets = random.integers(0, V, (B, T)).astype(np.int32)
    return x, w, targets, random.choice([0, 1, 2.5], (B, T)).astype(np.float32)


def plain(head: Head, x, w, targets, weights):
    """(objective, loss, weights) in float64, from full logits."""
    logits = x.astype(np.float64) @ w.astype(np.float64)
    if head.softcap is not None:
        logits = head.softcap * np.tanh(logits / head.softcap)
    top = logits.max(-1, keepdims=True)
    partition = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    losses = partition - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    loss = (weights * losses).sum()
    return loss + head.z_loss * (weights * partition**2).sum(), loss, weights.sum()


def ours(par, head: Head, arrays, output: int = 0):
    """The three sums, and the gradients of one of them with respect to x and w."""
    places = (*NAMES, *(("act_batch", "act_seq"),) * 2)
    put = lambda a, names: jax.device_put(a, jax.NamedSharding(par.mesh, par.spec(names)))
    x, w, targets, weights = (put(a, n) for a, n in zip(arrays, places, strict=True))

    def one(x, w):
        sums = cross_entropy(head, x, w, targets, weights)
        return sums[output], sums

    gradient = jax.jit(jax.grad(one, argnums=(0, 1), has_aux=True))
    (dx, dw), sums = gradient(x, w)
    return [float(s) for s in sums], dx, dw


@pytest.mark.parametrize(
    "rules, axes",
    [("dp", {}), ("tp", dict(tensor=8)), ("fsdp_sp", dict(seq=2, fsdp=2, tensor=2))],
)
@pytest.mark.parametrize("changes", [{}, dict(softcap=2.0, z_loss=0.1, chunk=3)])
def test_sums(rules, axes, changes):
    with on_mesh(rules, **axes) as par:
        sums, _, _ = ours(par, head(**changes), draw())
    assert sums == pytest.approx(plain(head(**changes), *draw()), rel=1e-5)


def test_gradient_is_that_of_finite_differences():
    arrays = draw()
    settings = head(softcap=2.0, z_loss=0.1, chunk=5)
    with on_mesh("tp", tensor=4) as par:
        _, dx, dw = ours(par, settings, arrays)
    step = 1e-6
    for argument, gradient in ((0, dx), (1, dw)):
        direction = np.random.default_rng(1).standard_normal(arrays[argument].shape)
        moved = [
            plain(settings, *[a + s * step * direction if i == argument else a
                              for i, a in enumerate(arrays)])[0]
            for s in (1, -1)
        ]  # fmt: skip
        slope = (moved[0] - moved[1]) / (2 * step)
        assert float((np.asarray(gradient) * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_large_logits_do_not_overflow():
    arrays = draw(scale=1e4)
    with on_mesh("tp", tensor=4) as par:
        sums, dx, dw = ours(par, head(chunk=3), arrays)
    assert sums == pytest.approx(plain(head(), *arrays), rel=1e-5)
    assert np.isfinite(dx).all() and np.isfinite(dw).all()


def test_tokens_of_weight_zero_count_for_nothing():
    x, w, targets, weights = draw()
    poisoned = np.where(weights[..., None] == 0, 1e6, x).astype(np.float32)
    with on_mesh("fsdp_tp", fsdp=2, tensor=2) as par:
        sums, dx, dw = ours(par, head(z_loss=0.1), (x, w, targets, weights))
        other, other_dx, other_dw = ours(par, head(z_loss=0.1), (poisoned, w, targets, weights))
    assert sums == other
    np.testing.assert_array_equal(dw, other_dw)
    assert not np.asarray(dx)[weights == 0].any() and not np.asarray(other_dx)[weights == 0].any()


def test_only_the_objective_carries_a_gradient():
    with on_mesh("tp", tensor=2) as par:
        _, dx, dw = ours(par, head(z_loss=0.1), draw(), output=1)
    assert not np.asarray(dx).any() and not np.asarray(dw).any()


def test_vocabulary_that_the_mesh_does_not_divide():
    with on_mesh("tp", tensor=5):
        arrays = [jnp.asarray(a) for a in draw()]
        with pytest.raises(ValueError, match="head: dimension 'vocab' of size 24 .* tensor=5"):
            cross_entropy(head(), *arrays)


def test_devices_of_other_tokens_cannot_share_a_vocabulary():
    with on_mesh(FSDP_RULES.replace(vocab="fsdp", embed=None), fsdp=2):
        arrays = [jnp.asarray(a) for a in draw()]
        with pytest.raises(ValueError, match="'vocab' and 'act_batch' both map to"):
            cross_entropy(head(), *arrays)
