"""How a layer's exact computation is carried out: values that layers ask the parallelism for.

A scheme changes execution only, never the logits; adding one touches no layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from layers.attention.schemes import AttentionScheme, attention_scheme
from meshes.collectives.matmul import project
from meshes.context import current


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schemes:
    """The active schemes.

    Attributes:
        attention: attention over a split sequence.
        project: matrix products of sharded operands (`meshes.collectives.matmul.project`).
        remat: rematerialisation policy by name, see `layers.remat.rematerialise`.
        scan_layers: loop over stacked layers, instead of writing them out.
        loss_chunk: tokens of a device whose logits exist at a time; 0 is all.
    """

    attention: AttentionScheme = attention_scheme("all_gather")
    project: Callable[..., Any] = project
    remat: str = "none"
    scan_layers: bool = True
    loss_chunk: int = 0


def active() -> Schemes:
    """Return the schemes of the active parallelism; the defaults, if it names none."""
    schemes = current().schemes
    return Schemes() if schemes is None else schemes
