"""Which keys a query sees, as data that schemes, the core and the kernels share."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Which keys a query sees, besides those of its own segment, and how scores are made.

    Attributes:
        causal: only keys at its own or an earlier position.
        window: only keys fewer than this many positions back; None is unlimited.
        scale: multiplies the scores.
        softcap: scores become cap * tanh(scores / cap); None is off.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def sees_block(self, first_query: int, queries: int, first_key: int, keys: int) -> bool:
        """Whether any query of a block sees any key of another, where positions are indices."""
        if self.causal and first_key >= first_query + queries:
            return False
        return self.window is None or first_query - (first_key + keys - 1) < self.window
