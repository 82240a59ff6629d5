"""Rotations: relative positions, and the stretched frequencies of the published recipes."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from layers.config import RopeConfig
from layers.rotary import attention_factor, frequencies, rotate, tables

H = 64
PLAIN = RopeConfig()


def turned(x: np.ndarray, position: int, config: RopeConfig = PLAIN) -> np.ndarray:
    cos, sin = tables(config, x.shape[-1], jnp.full((1, 1), position, jnp.int32))
    return np.asarray(rotate(jnp.asarray(x, jnp.float32)[None, None, None], cos, sin))[0, 0, 0]


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(0).standard_normal((2, H))
    near = turned(q, 12) @ turned(k, 5)
    far = turned(q, 1012) @ turned(k, 1005)
    assert near == pytest.approx(far, abs=2e-3)
    assert near != pytest.approx(turned(q, 12) @ turned(k, 6), abs=1e-2)


def test_a_turn_keeps_the_length_and_position_zero_turns_nothing():
    x = np.random.default_rng(0).standard_normal(H)
    np.testing.assert_array_equal(turned(x, 0), x.astype(np.float32))
    assert np.linalg.norm(turned(x, 321)) == pytest.approx(np.linalg.norm(x), rel=1e-6)


def test_halves_turn_together():
    """Class of complaints: pairs (2i, 2i+1) taken for (i, i+H/2), and silently other logits."""
    for i in (0, 5):
        unit = np.zeros(H)
        unit[i] = 1
        angle = 7 * 10_000.0 ** (-2 * i / H)
        out = turned(unit, 7)
        assert out[i] == pytest.approx(math.cos(angle), abs=1e-6)
        assert out[i + H // 2] == pytest.approx(math.sin(angle), abs=1e-6)
        assert np.count_nonzero(out) == 2


def test_theta():
    base = frequencies(RopeConfig(theta=500_000.0), 128)
    assert base[0] == 1
    assert base[-1] == pytest.approx(500_000.0 ** (-126 / 128))


def test_linear_scaling_divides_positions():
    config = RopeConfig(scaling="linear", factor=4.0)
    x = np.random.default_rng(0).standard_normal(H)
    np.testing.assert_allclose(turned(x, 40, config), turned(x, 10), rtol=1e-6, atol=1e-6)


def test_llama3_scaling_by_wavelength():
    """Llama 3.1's reference code, with its published parameters, in terms of wavelengths."""
    config = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0)
    original, low, high = 8192, 1.0, 4.0
    expected = []
    for frequency in frequencies(RopeConfig(theta=500_000.0), 128):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / 8)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    ours = frequencies(config, 128)
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    kept = ours == frequencies(RopeConfig(theta=500_000.0), 128)
    assert 0 < kept.sum() < 64  # all three kinds occur


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    """arXiv 2309.00071, equations 22-25: by turns over the original context, 32 and 1."""
    config = RopeConfig(scaling="yarn", factor=16.0, original_max_position=4096)
    base = frequencies(RopeConfig(), 128)
    turns = 4096 * base / (2 * math.pi)
    ratio = base / frequencies(config, 128)
    np.testing.assert_allclose(ratio[turns > 40], 1)
    np.testing.assert_allclose(ratio[turns < 0.8], 16)
    assert (np.diff(ratio) >= -1e-12).all()
    assert attention_factor(config) == pytest.approx(0.1 * math.log(16) + 1)
    x = np.random.default_rng(0).standard_normal(H)
    lengthened = np.linalg.norm(turned(x, 9, config)) / np.linalg.norm(x)
    assert lengthened == pytest.approx(attention_factor(config), rel=1e-5)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_only_yarn_scales_attention(scaling):
    assert attention_factor(RopeConfig(scaling=scaling, factor=8.0)) == 1


def test_bfloat16_is_turned_in_float32():
    """At position 30000 an angle in bfloat16 would be off by whole turns."""
    x = np.random.default_rng(0).standard_normal(H)
    cos, sin = tables(RopeConfig(), H, jnp.full((1, 1), 30_000, jnp.int32))
    narrow = rotate(jnp.asarray(x, jnp.bfloat16)[None, None, None], cos, sin)
    assert narrow.dtype == jnp.bfloat16
    off = np.abs(np.asarray(narrow, np.float32)[0, 0, 0] - turned(x, 30_000))
    assert off.max() < 0.03
