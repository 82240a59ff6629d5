"""Attention over a sequence split across devices: one signature, one object a scheme."""

from collections.abc import Callable

from layers.attention.kernels import CORE, Kernel
from layers.attention.schemes.all_gather import AllGather
from layers.attention.schemes.base import AttentionScheme

__all__ = ["ATTENTION_SCHEMES", "AttentionScheme", "attention_scheme"]

ATTENTION_SCHEMES: dict[str, Callable[[Kernel], AttentionScheme]] = {"all_gather": AllGather}


def attention_scheme(name: str, kernel: Kernel = CORE) -> AttentionScheme:
    """Return a scheme by name.

    Args:
        name: of the scheme.
        kernel: what attends on each device.

    Raises:
        ValueError: unknown name; the message lists the schemes.
    """
    if name not in ATTENTION_SCHEMES:
        raise ValueError(
            f"unknown attention scheme {name!r}; expected one of {', '.join(ATTENTION_SCHEMES)}"
        )
    return ATTENTION_SCHEMES[name](kernel)
