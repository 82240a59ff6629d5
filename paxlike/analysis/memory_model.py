"""Training memory of a device in closed form: whether a layout fits, before anything is compiled.

Parameters, gradients and optimizer state are counted tensor by tensor, each split as the rules say;
activations are the twelve tensors a layer that a backward pass with FlashAttention reads, times the
layers and micro-batches in flight. Of a Llama on a Megatron layout (rules `megatron_sp`, ZeRO-1)
this is the closed form of arXiv 2411.06465: 6 + 12/d bytes a parameter, and s b h (12 + 4 k/a +
8 f/h) bytes a layer. Rules make it general: FSDP, its gathered layer, experts. Free of JAX.

B batch, T sequence, D model, N query heads, K key/value heads, H head dim, F feed-forward, V vocab,
E experts, L layers. Not modelled: workspaces, what else the compiler keeps, imbalance of routing.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from layers.config import ModelConfig
from meshes.axes import SEQ, MeshShape
from meshes.rules import Rules

Fits = Literal["safe", "try", "no"]

# Of 454 measured runs none below it ran out of memory (arXiv 2411.06465): fragmentation, other
# programs and the runtime need the rest.
SAFE_FRACTION = 0.8


def verdict(needed_bytes: float, capacity_bytes: float) -> Fits:
    """Whether a program fits: `safe` up to 80 % of the capacity, `try` up to all of it, or `no`."""
    fraction = needed_bytes / capacity_bytes
    return "safe" if fraction <= SAFE_FRACTION else "try" if fraction <= 1 else "no"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is laid out and executed, as far as its memory depends on it.

    Attributes:
        mesh: size of each axis; `data`, `expert` and `fsdp` hold different sequences.
        rules: how parameters and activations are split; pipeline stages are counted apart.
        zero1: optimizer state split over the axes of the batch as well.
        zero1_over_seq: and over `seq` (Megatron does; whether the paper does is unknown).
        schedule: order of micro-batches in a pipeline.
        virtual: chunks of layers a stage (interleaved 1F1B); 1 is not interleaved.
        edges_as_layers: embedding and head each take the place of one layer in its stage.
        remat: as `parallel.remat`. `none` is the twelve tensors, whatever a compiler adds to them.
        loss_chunk: tokens of a device whose logits exist at a time; 0 is all.
        ring: keys and values travel round `seq`: two more blocks of both.

    Raises:
        ValueError: values out of range, or a combination that has no schedule.
    """

    mesh: MeshShape
    rules: Rules
    zero1: bool = False
    zero1_over_seq: bool = False
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    virtual: int = 1
    edges_as_layers: bool = False
    remat: str = "none"
    loss_chunk: int = 0
    ring: bool = False

    def __post_init__(self) -> None:
        for axis, size in self.mesh.sizes.items():
            if size < 1:
                raise ValueError(f"layout.mesh has {axis}={size}; expected the sizes resolved")
        if self.virtual < 1 or (self.virtual > 1 and self.schedule == "gpipe"):
            raise ValueError(
                f"layout.virtual is {self.virtual} with layout.schedule={self.schedule}; expected "
                "at least 1, and more than 1 with 1f1b only"
            )
        if self.loss_chunk < 0:
            raise ValueError(f"layout.loss_chunk is {self.loss_chunk}; expected at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element; the defaults are the paper's: bfloat16 with float32 Adam, 18 in all.

    Attributes:
        params: of a parameter.
        grads: of its gradient.
        optimizer: of its optimizer state: master copy and two moments.
        compute: of an activation.
        softmax: of the log-denominator kept for each query and head: 0 in the paper, 4 in ours.
    """

    params: int = 2
    grads: int = 4
    optimizer: int = 12
    compute: int = 2
    softmax: int = 0


PAPER = Widths()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a replica reads at a time.

    Attributes:
        sequences: of one micro-batch on one replica.
        length: tokens of each.
        count: micro-batches of a step.
    """

    sequences: int
    length: int
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one device of one pipeline stage.

    Attributes:
        params: parameters.
        grads: their gradients.
        optimizer: their optimizer state.
        activations: what layers keep for their backward passes, and one layer's recomputation.
        logits: the last stage's final norm, head input and logits.
        buffers: a layer gathered from its FSDP shards, and blocks that travel round a ring.
    """

    params: int
    grads: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array by its global shape and the logical name of each dimension."""

    what: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]

    def split(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of each dimension, or ValueError where one does not divide."""
        return layout.rules.split(self.names, layout.mesh.sizes, self.shape, self.what)

    def elements(self, layout: Layout, without: Iterable[str] = ()) -> int:
        """Elements on one device, as if the axes `without` did not split it."""
        used = [a for axes in self.split(layout) for a in axes if a not in without]
        return math.prod(self.shape) // _ways(layout, used)


def estimate(
    model: ModelConfig,
    layout: Layout,
    batch: MicroBatch,
    widths: Widths = PAPER,
    *,
    stage: int = 0,
) -> Estimate:
    """Estimate the memory of a device of one pipeline stage.

    Args:
        model: the architecture.
        layout: how it is executed.
        batch: what each replica reads.
        widths: bytes of elements.
        stage: which stage, from 0.

    Raises:
        ValueError: a tensor, the layers or the stage do not divide over the layout.
    """
    layers = layers_of(model, layout, stage)
    held = stage_parameters(model, layout, stage)
    elements = sum(tensor.elements(layout) for tensor in held)
    stored = sum(_state_elements(tensor, layout) for tensor in held)
    kept, live = layer_activations(model, layout, batch, widths)
    chunks = chunks_in_flight(layout, batch.count, stage)
    last = stage == layout.mesh.pipeline - 1
    return Estimate(
        params=elements * widths.params,
        grads=elements * widths.grads,
        optimizer=stored * widths.optimizer,
        activations=kept * (layers // layout.virtual) * chunks + live,
        logits=_logits(model, layout, batch, widths) if last else 0,
        buffers=_buffers(model, layout, batch, widths),
    )


def largest(
    model: ModelConfig,
    layout: Layout,
    batch: MicroBatch,
    widths: Widths = PAPER,
) -> Estimate:
    """Estimate of the stage that needs most; arguments and errors as `estimate`."""
    stages = range(layout.mesh.pipeline)
    every = (estimate(model, layout, batch, widths, stage=stage) for stage in stages)
    return max(every, key=lambda of_stage: of_stage.total)


def layers_of(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Number of layers of a stage.

    Raises:
        ValueError: there is no such stage, or layers do not divide over stages and chunks.
    """
    stages, edges = layout.mesh.pipeline, 2 * layout.edges_as_layers
    if not 0 <= stage < stages:
        raise ValueError(f"stage is {stage}; expected 0 to {stages - 1}")
    if (model.num_layers + edges) % (stages * layout.virtual):
        raise ValueError(
            f"model.num_layers is {model.num_layers} ({edges} more for the edges); expected a "
            f"multiple of pipeline={stages} x virtual={layout.virtual}"
        )
    share = (model.num_layers + edges) // stages
    at_edges = (stage == 0) + (stage == stages - 1)
    return share - at_edges * layout.edges_as_layers


def chunks_in_flight(layout: Layout, micro_batches: int, stage: int) -> int:
    """Chunks of layers (a whole stage, if not interleaved) whose activations a stage holds at most.

    1F1B holds min(m, p - i) micro-batches in stage i, GPipe all m. Interleaved with v chunks, stage
    0 holds v p + p - 1 of them: a factor 1 + (p - 1) / (p v) over no pipeline (arXiv 2104.04473).
    """
    stages, virtual = layout.mesh.pipeline, layout.virtual
    if stages == 1:
        return virtual
    if layout.schedule == "gpipe":
        return micro_batches
    if virtual == 1:
        return min(micro_batches, stages - stage)
    return min(micro_batches * virtual, virtual * stages + stages - 1 - 2 * stage)


def stage_parameters(model: ModelConfig, layout: Layout, stage: int) -> tuple[Tensor, ...]:
    """The parameters of a stage: its layers, stacked, and those of the edges that it has."""
    embed = model.embed_dim
    table = Tensor("embedding", (model.vocab_size, embed), ("vocab", "embed"))
    first, last = stage == 0, stage == layout.mesh.pipeline - 1
    held = list(_layer_parameters(model, layers_of(model, layout, stage)))
    if first or (last and model.tie_embeddings):
        held.append(table)
    if first and model.position == "learned":
        held.append(Tensor("positions", (model.max_position, embed), (None, "embed")))
    if last:
        held += [Tensor("final_norm", (embed,), ("norm",))] * _vectors(model)
    if last and not model.tie_embeddings:
        held.append(Tensor("head", (embed, model.vocab_size), ("embed", "vocab")))
    return tuple(held)


def _layer_parameters(model: ModelConfig, layers: int) -> Iterable[Tensor]:
    d, n, k, h = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim

    def stacked(what: str, *dims: tuple[int, str | None]) -> Tensor:
        return Tensor(
            what, (layers, *(size for size, _ in dims)), (None, *(name for _, name in dims))
        )

    embed, head = (d, "embed"), (h, "head_dim")
    for what, heads in (("query", (n, "q_heads")), ("out", (n, "q_heads")),
                        ("key", (k, "kv_heads")), ("value", (k, "kv_heads"))):  # fmt: skip
        yield stacked(what, embed, heads, head)
        if model.qkv_bias and what != "out":
            yield stacked(f"{what}_bias", heads, head)
    inward = ("gate", "up") if model.gated else ("up",)
    for what in (*inward, "down"):
        if model.moe is not None:
            experts = (model.moe.num_experts, "experts")
            yield stacked(what, experts, embed, (model.moe.expert_mlp_dim, "mlp"))
            continue
        yield stacked(what, embed, (model.mlp_dim, "mlp"))
        if model.mlp_bias and what != "down":
            yield stacked(f"{what}_bias", (model.mlp_dim, "mlp"))
    if model.moe is not None:
        yield stacked("router", (d, None), (model.moe.num_experts, None))
    norms = (4 if model.norm_placement == "pre_post" else 2) * _vectors(model)
    whole = norms + model.out_bias + (model.mlp_bias and model.moe is None)
    yield from [stacked("norm", (d, "norm"))] * whole
    yield from [stacked("qk_norm", (h, "norm"))] * (2 * model.qk_norm)


def _vectors(model: ModelConfig) -> int:
    return 2 if model.norm == "layer" else 1


def _state_elements(tensor: Tensor, layout: Layout) -> int:
    """Elements whose optimizer state a device holds."""
    split = tensor.split(layout)
    elements = tensor.elements(layout)
    if not layout.zero1:
        return elements
    axes = {*layout.rules.axes("act_batch"), *((SEQ,) if layout.zero1_over_seq else ())}
    free = _ways(layout, axes - {axis for of_dim in split for axis in of_dim})
    for size, of_dim in zip(tensor.shape, split, strict=True):
        if size % (_ways(layout, of_dim) * free) == 0:
            return elements // free
    return elements


def _ways(layout: Layout, axes: Iterable[str]) -> int:
    return math.prod(layout.mesh.sizes[axis] for axis in axes)


# What a backward pass reads, of the tags that `parallel.remat` may name.
_READ = (
    "layer_input", "attention_input", "query", "key", "value", "attention_context",
    "mlp_residual", "mlp_input", "mlp_gate", "mlp_up", "mlp_activation", "mlp_hidden",
)  # fmt: skip
_DOTS = ("layer_input", "query", "key", "value", "attention_out", "mlp_gate", "mlp_up")


def layer_activations(
    model: ModelConfig, layout: Layout, batch: MicroBatch, widths: Widths
) -> tuple[int, int]:
    """(bytes that a layer keeps of a micro-batch, bytes that one layer's recomputation adds).

    The twelve tensors: inputs of both norms and of the projections behind them, queries, keys,
    values, context, gate, up, activated gate and their product.

    Raises:
        ValueError: the policy names an activation that has no closed form here.
    """
    tensors = _activations(model, batch)
    kind, _, listed = layout.remat.partition(":")
    named = {"none": _READ, "full": ("layer_input",), "dots": _DOTS, "offload": ("layer_input",)}
    named["named"] = ("layer_input", *(name for name in listed.split(",") if name))
    if kind not in named:
        raise ValueError(
            f"remat is {layout.remat!r}; expected none, full, dots, named:a,b or offload:a,b"
        )
    for name in named[kind]:
        if name not in tensors and name not in _READ:
            raise ValueError(
                f"remat names {name!r}, which the closed form does not know; expected names of "
                f"{', '.join(tensors)}"
            )

    def size(name: str) -> int:
        elements = tensors[name].elements(layout)
        softmax = elements // model.head_dim * widths.softmax if name == "attention_context" else 0
        return elements * widths.compute + softmax

    kept = {name for name in named[kind] if name in tensors}
    again = {name for name in _READ if name in tensors} - kept
    return sum(map(size, kept)), sum(map(size, again))


def _activations(model: ModelConfig, batch: MicroBatch) -> dict[str, Tensor]:
    """Activations of a layer by tag, of one micro-batch."""
    b, t = batch.sequences, batch.length
    hidden = model.mlp_dim
    if model.moe is not None:
        hidden = model.moe.num_experts_per_token * model.moe.expert_mlp_dim

    def heads(name: str, count: int, axis: str) -> Tensor:
        return Tensor(name, (b, count, t, model.head_dim), (None, axis, "act_seq", None))

    def residual(name: str) -> Tensor:
        return Tensor(name, (b, t, model.embed_dim), (None, "act_residual_seq", "act_embed"))

    inner = ("mlp_gate", "mlp_up", "mlp_activation", "mlp_hidden")
    tensors = [
        *map(residual, ("layer_input", "attention_input", "attention_out", "mlp_residual")),
        *map(residual, ("mlp_input", "mlp_out")),
        heads("query", model.num_heads, "act_heads"),
        heads("attention_context", model.num_heads, "act_heads"),
        heads("key", model.num_kv_heads, "act_kv_heads"),
        heads("value", model.num_kv_heads, "act_kv_heads"),
        *(
            Tensor(name, (b, t, hidden), (None, "act_seq", "act_mlp"))
            for name in (inner if model.gated else ("mlp_up", "mlp_hidden"))
        ),
    ]
    return {tensor.what: tensor for tensor in tensors}


def _logits(model: ModelConfig, layout: Layout, batch: MicroBatch, widths: Widths) -> int:
    """Final norm, head input, and logits in the compute dtype with a float32 copy."""
    b, t = batch.sequences, batch.length
    hidden = Tensor("hidden", (b, t, model.embed_dim), (None, "act_residual_seq", "act_embed"))
    logits = Tensor("logits", (b, t, model.vocab_size), (None, "act_seq", "act_vocab"))
    tokens = Tensor("tokens", (b, t), (None, "act_seq")).elements(layout)
    rows = min(layout.loss_chunk or tokens, tokens)
    whole = logits.elements(layout) * rows // tokens
    return 2 * hidden.elements(layout) * widths.compute + whole * (widths.compute + 4)


def _buffers(model: ModelConfig, layout: Layout, batch: MicroBatch, widths: Widths) -> int:
    split = [axis for axis in layout.rules.axes("embed") if layout.mesh.sizes[axis] > 1]
    layer = list(_layer_parameters(model, 1))
    gathered = sum(tensor.elements(layout, without=split) for tensor in layer) if split else 0
    keys = _activations(model, batch)["key"].elements(layout)
    travelling = 4 * keys if layout.ring and layout.mesh.sizes[SEQ] > 1 else 0
    return (gathered + travelling) * widths.compute
