"""Named rule tables: each parallel strategy in a few lines.

`fsdp` and `hsdp` share a table, because replicating over one axis and sharding over another is a
matter of the mesh's shape; a preset that claims to shard parameters says so in `SHARDS_PARAMETERS`,
and is held to it.
"""

from meshes.axes import DATA, EXPERT, FSDP, SEQ, TENSOR
from meshes.rules import Rules

# Every axis that holds different examples. The expert axis carries data outside the experts.
_BATCH = (DATA, EXPERT, FSDP)

_SEQUENCE = Rules.of(act_batch=_BATCH, act_seq=SEQ, act_residual_seq=SEQ, experts=EXPERT,
                     act_experts=EXPERT)  # fmt: skip

DP = _SEQUENCE

FSDP_RULES = _SEQUENCE.replace(embed=FSDP)

# Fully sharded over two mesh axes: gathers and reductions run along one axis of a torus at a time.
# The TPU compiler turns a reduce-scatter over a whole slice into an all-reduce; over an axis not.
FSDP_2D = _SEQUENCE.replace(embed=(DATA, FSDP))

TP = _SEQUENCE.replace(
    vocab=TENSOR, q_heads=TENSOR, kv_heads=TENSOR, mlp=TENSOR,
    act_vocab=TENSOR, act_heads=TENSOR, act_kv_heads=TENSOR, act_mlp=TENSOR,
)  # fmt: skip

# The residual stream between the blocks is split along the sequence over the tensor axis too.
MEGATRON_SP = TP.replace(act_residual_seq=(SEQ, TENSOR))

FSDP_TP = TP.replace(embed=FSDP)

FSDP_SP = MEGATRON_SP.replace(embed=FSDP)

PRESETS: dict[str, Rules] = {
    "dp": DP,
    "fsdp": FSDP_RULES,
    "hsdp": FSDP_RULES,
    "fsdp_2d": FSDP_2D,
    "tp": TP,
    "megatron_sp": MEGATRON_SP,
    "fsdp_tp": FSDP_TP,
    "fsdp_sp": FSDP_SP,
}

# Strategies that claim to leave (almost) no parameter replicated over these axes.
SHARDS_PARAMETERS: dict[str, tuple[str, ...]] = {
    "fsdp": (FSDP,),
    "hsdp": (FSDP,),
    "fsdp_2d": (DATA, FSDP),
    "tp": (TENSOR,),
    "megatron_sp": (TENSOR,),
    "fsdp_tp": (FSDP, TENSOR),
    "fsdp_sp": (FSDP, TENSOR),
}


def preset(name: str) -> Rules:
    """Return a rule table by name.

    Raises:
        ValueError: unknown name; the message lists the presets.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown rule preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def for_generation(rules: Rules) -> Rules:
    """The same layout for generating text: the axes that split the sequence hold rows instead.

    A step reads one token a row, which no axis can split along the sequence; the parameters stay
    where they are.
    """
    batch = rules.axes("act_batch")
    sequence = tuple(axis for axis in rules.axes("act_seq") if axis not in batch)
    return rules.replace(
        act_batch=batch + sequence, act_seq=None, act_kv_seq=None, act_residual_seq=None
    )
