"""Whose mistake an exception is."""

import jax
import jax.numpy as jnp
import pytest

from meshes.presets import preset
from paxlike import errors


def caught(function) -> Exception:
    with pytest.raises(Exception) as info:
        function()
    return info.value


def test_a_message_that_our_packages_raise_is_the_users():
    assert errors.is_users_mistake(caught(lambda: preset("ftp")))
    assert errors.is_users_mistake(caught(lambda: open("/no/such/file")))


def test_a_message_survives_jax_tracing():
    def traced(x):
        preset("ftp")
        return x

    assert errors.is_users_mistake(caught(lambda: jax.jit(traced)(1.0)))


def test_an_error_of_a_library_is_ours():
    assert not errors.is_users_mistake(caught(lambda: jnp.ones(3) @ jnp.ones(4)))
    assert not errors.is_users_mistake(caught(lambda: jnp.reshape(jnp.ones(3), (2, 2))))


def test_a_slip_inside_our_packages_is_ours():
    # The interpreter raises here, in a frame of ours, without a `raise`.
    assert not errors.is_users_mistake(caught(lambda: errors.expected_name("name", "x", None)))
    assert not errors.is_users_mistake(caught(lambda: errors.one_line()))


def test_near_matches_come_before_the_list():
    message = errors.expected_name("mode", "evl", ["train", "eval"])
    assert message == "unknown mode 'evl'; did you mean eval? expected one of train, eval"
    assert "did you mean" not in errors.expected_name("mode", "zzz", ["train", "eval"])
