"""Settings of every test: eight virtual CPU devices, strict ranks, one shared compilation cache."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get(
        "PAXLIKE_TEST_CACHE", str(pathlib.Path(__file__).parent.parent / ".cache" / "jax-tests")
    ),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """A missing device is a failure, not a skip: parallel tests must not pass by not running."""
    assert jax.device_count() == 8, f"expected 8 virtual CPU devices, got {jax.devices()}"
