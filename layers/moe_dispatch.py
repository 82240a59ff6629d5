"""Which token visits which expert, and the rows in which tokens wait for their experts.

N tokens of a device, K experts a token, P = K N pairs, E experts, R rows, M rows of a block,
D model. Pairs are sorted by expert, first choices before second ones. Rows and pairs know each
other's index, so that tokens move to rows and back, forward and backward, by gathers alone: no
scatter of vectors. Nothing is exchanged here.
Source: GShard (arXiv 2006.16668), Switch (2101.03961), ST-MoE (2202.08906).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.config import MoEConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The router's answer for N tokens.

    Attributes:
        experts_NK: int32 chosen experts, best first; E, which is none, for padding.
        gates_NK: weight of each chosen expert's output, accumulation dtype.
        sums: [2E + 2] of this device's tokens: pairs of each expert, its router probability,
            squared log-partition, and number of tokens.
    """

    experts_NK: jax.Array
    gates_NK: jax.Array
    sums: jax.Array


def route(moe: MoEConfig, x_ND: jax.Array, router_DE: jax.Array, real_N: jax.Array) -> Choice:
    """Choose each token's experts, in the router's dtype and at full precision.

    Args:
        moe: the mixture.
        x_ND: tokens.
        router_DE: router weights in the accumulation dtype.
        real_N: bool, False for padding, which visits no expert and counts nowhere.
    """
    dtype = router_DE.dtype

    def score(x: jax.Array, router: jax.Array) -> jax.Array:
        return jnp.einsum("nd,de->ne", x.astype(dtype), router, precision="highest")

    # The wide copy of x is made again backward, rather than kept.
    logits_NE = jax.checkpoint(score, prevent_cse=False)(x_ND, router_DE)
    logits_NE = checkpoint_name(logits_NE, "moe_router")
    log_partition_N = jax.nn.logsumexp(logits_NE, axis=-1)
    probabilities_NE = jnp.exp(logits_NE - log_partition_N[:, None])
    _, experts_NK = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), moe.num_experts_per_token)
    chosen_NKE = jax.nn.one_hot(experts_NK, moe.num_experts, dtype=dtype)
    gates_NK = jnp.sum(chosen_NKE * probabilities_NE[:, None, :], axis=-1)
    if moe.normalize_weights:
        gates_NK = gates_NK / jnp.sum(gates_NK, axis=-1, keepdims=True)
    weight_N = real_N.astype(dtype)
    sums = (
        jnp.sum(chosen_NKE * weight_N[:, None, None], axis=(0, 1)),
        jnp.sum(probabilities_NE * weight_N[:, None], axis=0),
        jnp.sum(log_partition_N**2 * weight_N)[None],
        jnp.sum(weight_N)[None],
    )
    experts_NK = jnp.where(real_N[:, None], experts_NK, moe.num_experts)
    return Choice(experts_NK=experts_NK, gates_NK=gates_NK, sums=jnp.concatenate(sums))


def losses(moe: MoEConfig, sums: jax.Array) -> dict[str, jax.Array]:
    """Auxiliary losses of one layer, from the sums over all tokens of the batch.

    The balance loss is E * sum(fraction of pairs * mean probability): 1 when the experts are evenly
    loaded, whatever K.
    """
    pairs_E, probability_E, (z, tokens) = jnp.split(sums, (moe.num_experts, 2 * moe.num_experts))
    tokens = jnp.maximum(tokens, 1)
    fraction_E = pairs_E / (tokens * moe.num_experts_per_token)
    balance = moe.num_experts * jnp.sum(fraction_E * probability_E / tokens)
    return {
        "moe_balance_loss": moe.auxiliary_loss * balance,
        "moe_z_loss": moe.z_loss * z / tokens,
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where pairs wait; the rows are B blocks of M, and each block belongs to one expert.

    Attributes:
        rows_KN: row of each pair; R, which is none, for a pair that waits nowhere.
        pairs_R: pair k N + n of each row; K N, which is none, for an empty row.
        experts_B: expert of each block; the number of experts for a block that nobody needs.
        placed: int32 number of pairs that have a row.
    """

    rows_KN: jax.Array
    pairs_R: jax.Array
    experts_B: jax.Array
    placed: jax.Array


def place_with_capacity(experts_KN: jax.Array, num_experts: int, capacity: int) -> Placement:
    """Give each expert one block of `capacity` rows; pairs beyond them are dropped.

    Args:
        experts_KN: int32 expert of each pair, `num_experts` for none.
        num_experts: E.
        capacity: M.
    """
    counts_E = _counts(experts_KN, num_experts)
    first_E = capacity * jnp.arange(num_experts)
    held_E = jnp.minimum(counts_E, capacity)
    return _place(experts_KN, counts_E, first_E, held_E, jnp.arange(num_experts), capacity)


def place_all(experts_KN: jax.Array, num_experts: int, block: int, num_blocks: int) -> Placement:
    """Give each expert as many blocks of `block` rows as it needs; nothing is dropped.

    Args:
        experts_KN: int32 expert of each pair, `num_experts` or more for none.
        num_experts: experts of this device.
        block: M.
        num_blocks: enough for any routing, see `num_blocks`.
    """
    counts_E = _counts(experts_KN, num_experts)
    last_E = jnp.cumsum(-(-counts_E // block))
    first_E = block * (last_E - -(-counts_E // block))
    experts_B = jnp.sum(last_E[None, :] <= jnp.arange(num_blocks)[:, None], axis=1)
    return _place(experts_KN, counts_E, first_E, counts_E, experts_B, block)


def num_blocks(pairs: int, num_experts: int, block: int) -> int:
    """Blocks that hold `pairs` pairs however they fall on the experts."""
    return max((pairs + num_experts * (block - 1)) // block, 1)


def block_rows(pairs_per_expert: float) -> int:
    """Rows of a block: about a quarter of an expert's even share, so that padding costs an eighth.

    At least 8 (a row of registers) and at most 512, where matrix products are at their peak.
    """
    return 2 ** min(max(round(math.log2(max(pairs_per_expert, 1))) - 2, 3), 9)


def _counts(experts_KN: jax.Array, num_experts: int) -> jax.Array:
    same = experts_KN[None, :, :] == jnp.arange(num_experts)[:, None, None]
    return jnp.sum(same, axis=(1, 2), dtype=jnp.int32)


def _place(experts_KN, counts_E, first_E, held_E, experts_B, block: int) -> Placement:
    num_rows, num_pairs, num_experts = experts_B.size * block, experts_KN.size, counts_E.size
    index_P = jnp.arange(num_pairs)
    # Stable, so that a pair's place does not depend on the sort's implementation.
    experts_P, pairs_P = jax.lax.sort(
        (experts_KN.reshape(-1), jnp.broadcast_to(index_P, num_pairs)), num_keys=1, is_stable=True
    )
    expert_P = jnp.minimum(experts_P, num_experts - 1)
    rank_P = index_P - (jnp.cumsum(counts_E) - counts_E)[expert_P]
    placed_P = (experts_P < num_experts) & (rank_P < held_E[expert_P])
    row_P = jnp.where(placed_P, first_E[expert_P] + rank_P, num_rows)
    rows_P = jnp.zeros_like(row_P).at[pairs_P].set(row_P, unique_indices=True)
    pairs_R = jnp.full(num_rows, num_pairs, jnp.int32).at[row_P].set(pairs_P, mode="drop")
    return Placement(
        rows_KN=rows_P.reshape(experts_KN.shape), pairs_R=pairs_R, experts_B=experts_B,
        placed=jnp.sum(held_E),
    )  # fmt: skip


def _to_rows(x_ND: jax.Array, gates_KN: jax.Array | None, place: Placement) -> jax.Array:
    """Copy tokens, scaled by their gates, to the rows of their pairs; empty rows are zero."""
    num_tokens = x_ND.shape[0]
    pairs_R = place.pairs_R
    tokens_R = jnp.where(pairs_R < place.rows_KN.size, pairs_R % num_tokens, num_tokens)
    rows_RD = x_ND.at[tokens_R].get(mode="fill", fill_value=0)
    if gates_KN is None:
        return rows_RD
    gates_R = gates_KN.reshape(-1).at[pairs_R].get(mode="fill", fill_value=0)
    return rows_RD * gates_R[:, None]


def _row_of_choice(rows_RD: jax.Array, row_N: jax.Array) -> jax.Array:
    return rows_RD.at[row_N].get(mode="fill", fill_value=0)


def _to_tokens(rows_RD: jax.Array, gates_KN: jax.Array | None, place: Placement) -> jax.Array:
    """Sum the rows of each token's pairs, scaled by their gates, in float32 or wider."""
    dtype = jnp.promote_types(rows_RD.dtype, jnp.float32)
    total_ND = jnp.zeros((), dtype)
    for k, row_N in enumerate(place.rows_KN):
        rows_ND = _get_rows(rows_RD, row_N, dtype)
        total_ND += rows_ND if gates_KN is None else rows_ND * gates_KN[k][:, None]
    return total_ND


def _get_rows(rows_RD: jax.Array, row_N: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return rows_RD.at[row_N].get(mode="fill", fill_value=0).astype(dtype)


def spread(x_ND: jax.Array, place: Placement) -> jax.Array:
    """Copy each token to the rows [R, D] of its pairs; empty rows are zero."""
    return _spread(x_ND, place)


_spread = jax.custom_vjp(lambda x_ND, place: _to_rows(x_ND, None, place))
_spread.defvjp(
    lambda x_ND, place: (_to_rows(x_ND, None, place), place),
    lambda place, drows_RD: (_to_tokens(drows_RD, None, place).astype(drows_RD.dtype), None),
)


def collect(rows_RD: jax.Array, gates_KN: jax.Array, place: Placement) -> jax.Array:
    """Sum each token's rows, times their gates: [N, D] in float32 or wider."""
    return _collect(rows_RD, gates_KN, place)


def _collect_backward(residuals, dy_ND: jax.Array):
    rows_RD, gates_KN, place = residuals
    dgates = [
        jnp.sum(dy_ND * _get_rows(rows_RD, row_N, dy_ND.dtype), axis=1) for row_N in place.rows_KN
    ]
    drows_RD = _to_rows(dy_ND, gates_KN, place).astype(rows_RD.dtype)
    return drows_RD, jnp.stack(dgates).astype(gates_KN.dtype), None


_collect = jax.custom_vjp(_to_tokens)
_collect.defvjp(
    lambda rows_RD, gates_KN, place: (
        _to_tokens(rows_RD, gates_KN, place),
        (rows_RD, gates_KN, place),
    ),
    _collect_backward,
)
