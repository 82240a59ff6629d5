"""Attention over a sequence split across devices: one signature, one object a scheme."""

from layers.attention.schemes.all_gather import AllGather
from layers.attention.schemes.base import AttentionScheme, Masking

__all__ = ["ATTENTION_SCHEMES", "AttentionScheme", "Masking", "attention_scheme"]

ATTENTION_SCHEMES: dict[str, AttentionScheme] = {"all_gather": AllGather()}


def attention_scheme(name: str) -> AttentionScheme:
    """Return a scheme by name.

    Raises:
        ValueError: unknown name; the message lists the schemes.
    """
    if name not in ATTENTION_SCHEMES:
        raise ValueError(
            f"unknown attention scheme {name!r}; expected one of {', '.join(ATTENTION_SCHEMES)}"
        )
    return ATTENTION_SCHEMES[name]
