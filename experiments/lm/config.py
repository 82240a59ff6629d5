"""Base language models.

`quickstart` and `lm_100m` are trained; the published ones are for compilation, planning and
simulation, with dimensions from their model cards (Llama 2: arXiv 2307.09288; Llama 3 and 3.1:
arXiv 2407.21783; Qwen3: arXiv 2505.09388; Mixtral: arXiv 2401.04088; GPT-3: arXiv 2005.14165).
"""

import dataclasses
from typing import Any

from layers.config import FLOAT32, ModelConfig, MoEConfig, RopeConfig
from meshes.axes import MeshShape
from paxlike.config import Experiment, InferenceConfig, ParallelConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.registry import register
from paxlike.training.config import OptimizerConfig, TrainConfig


def _llama(
    *, layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, **others: Any
) -> ModelConfig:
    """A Llama-shaped decoder: heads of 128, RMS norm, SwiGLU, no biases, untied embeddings."""
    return ModelConfig(
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        mlp_dim=mlp,
        vocab_size=vocab,
        **others,
    )


def _published(model: ModelConfig, **parallel: Any) -> Experiment:
    """A published model on synthetic tokens of its vocabulary: nothing to download."""
    return Experiment(
        model=model,
        parallel=ParallelConfig(remat="full", **parallel),
        data=DataConfig(
            source=SourceConfig(kind="synthetic", vocab_size=model.vocab_size),
            sequence_length=min(4096, model.max_position),
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(num_steps=100_000, global_batch_size=512, checkpoint_every=1000),
    )


@register
def quickstart() -> Experiment:
    """A decoder of 3.0M parameters on the Python standard library's bytes, on 8 virtual devices."""
    return Experiment(
        model=ModelConfig(
            vocab_size=264,
            num_layers=4,
            embed_dim=256,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            mlp_dim=704,
            max_position=1024,
            tie_embeddings=True,
            dtypes=FLOAT32,
        ),
        parallel=ParallelConfig(mesh=MeshShape(data=2, seq=2, tensor=2), rules="tp"),
        data=DataConfig(tokenizer="byte", sequence_length=256),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, weight_decay=0.05),
        train=TrainConfig(
            num_steps=240,
            global_batch_size=8,
            log_every=10,
            eval_every=80,
            eval_steps=8,
            checkpoint_every=80,
        ),
        inference=InferenceConfig(prompt="def __init__(self", max_new_tokens=96),
    )


@register
def lm_100m() -> Experiment:
    """A decoder of 98M parameters on the Python standard library, for one GPU or a TPU host."""
    return Experiment(
        model=ModelConfig(
            vocab_size=16_384,
            num_layers=12,
            embed_dim=768,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            mlp_dim=2048,
            max_position=2048,
            tie_embeddings=True,
            qk_norm=True,
        ),
        parallel=ParallelConfig(mesh=MeshShape(fsdp=-1), rules="fsdp"),
        data=DataConfig(tokenizer="bpe:16384", sequence_length=1024),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200),
        train=TrainConfig(
            num_steps=5000,
            global_batch_size=64,
            eval_every=250,
            eval_steps=16,
            checkpoint_every=500,
        ),
    )


@register
def llama2_7b() -> Experiment:
    """Llama 2 7B: 6,738,415,616 parameters, FSDP 16 x tensor 4."""
    model = _llama(
        layers=32, embed=4096, heads=32, kv_heads=32, mlp=11_008, vocab=32_000, max_position=4096
    )
    return _published(model, mesh=MeshShape(fsdp=16, tensor=4))


@register
def llama3_8b() -> Experiment:
    """Llama 3 8B: 8,030,261,248 parameters, FSDP 16 x tensor 4."""
    model = _llama(
        layers=32, embed=4096, heads=32, kv_heads=8, mlp=14_336, vocab=128_256,
        rope=RopeConfig(theta=500_000.0),
    )  # fmt: skip
    return _published(model, mesh=MeshShape(fsdp=16, tensor=4), loss_chunk=1024)


@register
def llama3_70b() -> Experiment:
    """Llama 3 70B: 70,553,706,496 parameters, FSDP 64 x tensor 8."""
    model = _llama(
        layers=80, embed=8192, heads=64, kv_heads=8, mlp=28_672, vocab=128_256,
        rope=RopeConfig(theta=500_000.0),
    )  # fmt: skip
    return _published(model, mesh=MeshShape(fsdp=64, tensor=8), loss_chunk=1024)


@register
def llama3_405b() -> Experiment:
    """Llama 3.1 405B: 405,853,388,800 parameters, FSDP 256 x tensor 8."""
    rope = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0)
    model = _llama(
        layers=126, embed=16_384, heads=128, kv_heads=8, mlp=53_248, vocab=128_256,
        max_position=131_072, rope=rope,
    )  # fmt: skip
    return _published(model, mesh=MeshShape(fsdp=256, tensor=8), loss_chunk=1024)


@register
def qwen3_8b() -> Experiment:
    """Qwen3 8B: 8,190,735,360 parameters, FSDP 16 x tensor 4."""
    model = _llama(
        layers=36, embed=4096, heads=32, kv_heads=8, mlp=12_288, vocab=151_936,
        max_position=40_960, qk_norm=True, norm_eps=1e-6, rope=RopeConfig(theta=1_000_000.0),
    )  # fmt: skip
    return _published(model, mesh=MeshShape(fsdp=16, tensor=4), loss_chunk=1024)


@register
def mixtral_8x7b() -> Experiment:
    """Mixtral 8x7B: 46,702,792,704 parameters, expert 8 x FSDP 8 x tensor 4."""
    model = _llama(
        layers=32, embed=4096, heads=32, kv_heads=8, mlp=14_336, vocab=32_000,
        max_position=32_768, rope=RopeConfig(theta=1_000_000.0),
        moe=MoEConfig(num_experts=8, num_experts_per_token=2, expert_mlp_dim=14_336),
    )  # fmt: skip
    return _published(model, mesh=MeshShape(expert=8, fsdp=8, tensor=4))


@register
def gpt3_175b() -> Experiment:
    """GPT-3 175B: 174.6 billion parameters, FSDP 64 x tensor 8."""
    model = ModelConfig(
        vocab_size=50_304,
        num_layers=96,
        embed_dim=12_288,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        mlp_dim=49_152,
        max_position=2048,
        activation="gelu_tanh",
        norm="layer",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )
    return _published(model, mesh=MeshShape(fsdp=64, tensor=8))


def _maxtext_scale(*, embed: int, rows: int) -> Experiment:
    """A model of MaxText's scaling runs of December 2023 on one v5e-256 slice.

    32 layers, 32 heads of 256, two feed-forward matrices of width 32,768 around a ReLU, tied
    embeddings, 2048 tokens, fully sharded over 256 chips, everything recomputed. The fsdp_2d rules
    keep each collective on one axis of the slice's 16 x 16 torus.
    """
    model = ModelConfig(
        vocab_size=32_768,
        num_layers=32,
        embed_dim=embed,
        num_heads=32,
        num_kv_heads=32,
        head_dim=256,
        mlp_dim=32_768,
        max_position=2048,
        activation="relu",
        tie_embeddings=True,
    )
    experiment = _published(
        model, mesh=MeshShape(data=16, fsdp=16), rules="fsdp_2d", loss_chunk=2048
    )
    train = dataclasses.replace(experiment.train, global_batch_size=256 * rows)
    return dataclasses.replace(experiment, train=train)


@register
def maxtext_16b() -> Experiment:
    """MaxText's 16B scaling run: 16,274,232,320 parameters, FSDP 16 x 16, 6 sequences a chip."""
    return _maxtext_scale(embed=5120, rows=6)


@register
def maxtext_32b() -> Experiment:
    """MaxText's 32B scaling run: 32,548,464,640 parameters, FSDP 16 x 16, 4 sequences a chip."""
    return _maxtext_scale(embed=10_240, rows=4)
