"""Hand-written comparisons broadcast as plain JAX lets them."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def plain_broadcasting() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield
