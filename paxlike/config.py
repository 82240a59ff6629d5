"""An experiment: one typed value that says all of it.

`model` is the architecture, `parallel` how it is executed on devices (exactly: the same logits),
the rest what it reads, how it learns and how it answers. Free of JAX.
"""

import dataclasses
from typing import Literal

from layers.config import ModelConfig
from meshes.axes import MeshShape
from meshes.presets import preset
from meshes.rules import Rules
from paxlike.data.config import DataConfig
from paxlike.training.config import OptimizerConfig, TrainConfig

AttentionKernel = Literal["auto", "jnp", "splash", "triton"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is laid out and executed; none of it changes the mathematics.

    Attributes:
        mesh: size of each mesh axis.
        dcn_mesh: how many slices (TPU) or nodes (GPU) each axis spans over the slow network; the
            axis sizes of `mesh` are products of both. None is one slice.
        rules: a preset's name, or a table of its own.
        attention: scheme of attention over a split sequence.
        attention_kernel: what attends on each device: `jnp` (the tiled core), `splash` (Pallas for
            TPUs), `triton` (Pallas for GPUs), or `auto`, the one of the devices' platform. What a
            kernel cannot express is left to the core; the report says so, and why.
        remat: what the backward pass recomputes: `none`, `full`, `dots`, `named:a,b` (keep only
            these named activations) or `offload:a,b` (keep these in host memory).
        scan_layers: compile one layer and loop over it, instead of every layer in line.
        loss_chunk: tokens of a device whose logits exist at a time; 0 is all.
        zero1: optimizer state split over the data axis.
        compiler_options: XLA options of the compiled step, as (name, value) pairs.
    """

    mesh: MeshShape = MeshShape(data=-1)
    dcn_mesh: MeshShape | None = None
    rules: str | Rules = "fsdp_tp"
    attention: str = "all_gather"
    attention_kernel: AttentionKernel = "auto"
    remat: str = "none"
    scan_layers: bool = True
    loss_chunk: int = 0
    zero1: bool = False
    compiler_options: tuple[tuple[str, str | int | bool], ...] = ()

    def __post_init__(self) -> None:
        table = self.rule_table
        if not isinstance(table, Rules):
            raise TypeError(f"parallel.rules is {self.rules!r}; expected a preset name or Rules")
        for name, axes in table.table:
            for axis in axes:
                if axis not in self.mesh.sizes:
                    raise ValueError(
                        f"parallel.rules map {name!r} to the mesh axis {axis!r}; expected axes of "
                        f"parallel.mesh: {', '.join(self.mesh.sizes)}"
                    )
        kind, _, names = self.remat.partition(":")
        if kind not in ("none", "full", "dots", "named", "offload") or (
            bool(names) != (kind in ("named", "offload"))
        ):
            raise ValueError(
                f"parallel.remat is {self.remat!r}; expected none, full, dots, named:<a,b> or "
                "offload:<a,b>"
            )
        if self.loss_chunk < 0:
            raise ValueError(f"parallel.loss_chunk is {self.loss_chunk}; expected at least 0")

    @property
    def rule_table(self) -> Rules:
        return preset(self.rules) if isinstance(self.rules, str) else self.rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """How text is generated.

    Attributes:
        prompt: text to continue.
        max_new_tokens: tokens to add.
        temperature: 0 is greedy.
        top_k: keep only the k likeliest tokens; 0 is all.
        top_p: keep the smallest set of tokens with this probability; 1 is all.
        checkpoint: which one generation and evaluation read: `newest`, `best` (the lowest
            evaluation loss), or a step.
    """

    prompt: str = "def main("
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    checkpoint: str = "newest"

    def __post_init__(self) -> None:
        if self.checkpoint not in ("newest", "best") and not self.checkpoint.isdecimal():
            raise ValueError(
                f"inference.checkpoint is {self.checkpoint!r}; expected newest, best or a step"
            )
        if self.max_new_tokens < 1:
            raise ValueError(
                f"inference.max_new_tokens is {self.max_new_tokens}; expected at least 1"
            )
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"inference.temperature is {self.temperature}, top_k {self.top_k}, top_p "
                f"{self.top_p}; expected temperature and top_k of at least 0, top_p in (0, 1]"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that one run needs; `config.json` in the workdir is this value.

    Attributes:
        name: registered name, equal to its folder where it is a paper's; given by the registry.
        description: one line for `--list`; given by the registry.
        model: the architecture.
        parallel: layout and execution.
        data: what is read.
        optimizer: how parameters move.
        train: the run.
        inference: how text is generated.
        seed: of initialisation, data order and sampling.
    """

    name: str = "unnamed"
    description: str = ""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    inference: InferenceConfig = InferenceConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data.sequence_length > self.model.max_position:
            raise ValueError(
                f"data.sequence_length is {self.data.sequence_length}; expected at most "
                f"model.max_position = {self.model.max_position}"
            )
        for source in self.data.sources:
            if source.kind == "synthetic" and source.vocab_size > self.model.vocab_size:
                raise ValueError(
                    f"data.source.vocab_size is {source.vocab_size}; expected at most "
                    f"model.vocab_size = {self.model.vocab_size}, the rows of the embedding"
                )
        kind, _, size = self.data.tokenizer.partition(":")
        if kind == "bpe" and int(size) > self.model.vocab_size:
            raise ValueError(
                f"data.tokenizer is {self.data.tokenizer}; expected at most model.vocab_size = "
                f"{self.model.vocab_size} tokens, the rows of the embedding"
            )
