"""Sparse mixture of experts: each token visits its k best feed-forward networks.

B batch, T length, N tokens of a device, K experts a token, E experts, g ways of the experts,
D model, F feed-forward, w bytes of an element. The axes that split the experts split tokens too,
outside this block. What is exchanged over them depends on the routing:

| routing    | forward                                   | bytes sent a device, each             |
| ---------- | ----------------------------------------- | ------------------------------------- |
| `capacity` | all-to-all of the rows of each expert, to | (g-1)/g * cf K N D w                  |
|            | its owner and back                        |                                       |
| `dropless` | all-gather of the tokens, reduce-scatter  | (g-1) N D w                           |
|            | of the sums of the owned experts' outputs |                                       |

and the same again backward. `dropless` computes every pair whatever the router says, so that the
result does not depend on the mesh. An all-to-all with room for the worst case would move
(g-1) min(K, E/g) N D w, never less than the gather; an exact one needs sizes known at run time
only, for which XLA has no CPU implementation. With g > 1 a device has room for the worst case,
min(K, E/g) g N rows, and computes just those in use.

`capacity` gives each expert ceil(cf K N / E) rows of every source device (at most N, which drops
nothing), and drops pairs beyond them, later choices first. Which pairs are dropped, and so the
logits, depends on how tokens lie on the devices, unless nothing overflows.

Tensor parallelism splits F: one reduction of [B, T, D] forward and one backward, in the layout of
the residual stream, and backward one of the gates [B, T, K]. The router is whole on every device:
it has 1/(3 F) of a gated layer's weights, and so routing exchanges nothing; the sums that the
auxiliary losses need are one all-reduce of [2E + 3].
Source: GShard (arXiv 2006.16668), Mixtral (2401.04088), MegaBlocks (2211.15841).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers.config import ModelConfig, MoEConfig
from layers.linear import normal, weight_names
from layers.moe_dispatch import (
    Placement,
    block_rows,
    collect,
    losses,
    num_blocks,
    place_all,
    place_with_capacity,
    route,
    spread,
)
from layers.moe_experts import Experts, apply_experts
from layers.tokens import Tokens
from meshes.collectives.partial import Moves, enter, leave
from meshes.collectives.varying import varying, vma
from meshes.context import current

RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
TOKENS = ("act_batch", "act_residual_seq")


class MoE(nnx.Module):
    """A sparse feed-forward block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        moe = _moe(config)
        self.config = config
        e, d, f = moe.num_experts, config.embed_dim, moe.expert_mlp_dim
        std, dtypes = config.init_std, config.dtypes

        def inward(what: str) -> nnx.Param:
            names = ("experts", "embed", "mlp")
            return normal(rngs, (e, d, f), names, std=std, dtypes=dtypes, what=what)

        self.router = normal(rngs, (d, e), (None, None), std=std, dtypes=dtypes, what="moe.router")
        self.gate = inward("moe.gate") if config.gated else None
        self.up = inward("moe.up")
        self.down = normal(
            rngs, (e, f, d), ("experts", "mlp", "embed"),
            std=std / (2 * config.num_layers) ** 0.5, dtypes=dtypes, what="moe.down",
        )  # fmt: skip

    def __call__(self, x_BTD: jax.Array, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Map the residual stream to the block's output.

        Args:
            x_BTD: [B, T, D], (act_batch, act_residual_seq, act_embed), compute dtype.
            tokens: which tokens are padding: they visit no expert and count nowhere.

        Returns:
            The output, laid out as x, zero for padding; and scalars in the accumulation dtype,
            over all tokens of the batch: `moe_balance_loss` and `moe_z_loss`, weighted as the
            config says, and `moe_dropped`, the share of dropped pairs divided by the number of
            layers, so that its sum over layers is their mean.

        Raises:
            ValueError: the rules split the experts over axes that do not split tokens.
        """
        par = current()
        weights = [w for w in (self.gate, self.up, self.down) if w is not None]
        x_spec = par.spec(RESIDUAL, x_BTD.shape, "input")
        token_spec = par.spec(TOKENS, x_BTD.shape[:2], "tokens")
        layout = _Layout(self.config, [weight_names(w) for w in weights])

        def local(x_BTD, segments_BT, router_DE, weights):
            return _local(self.config, layout, x_BTD, segments_BT, router_DE, weights)

        out, auxiliary = jax.shard_map(
            local,
            in_specs=(
                x_spec, token_spec, par.spec(weight_names(self.router)),
                tuple(par.spec(weight_names(w), w.shape, "weight") for w in weights),
            ),
            out_specs=(x_spec, jax.sharding.PartitionSpec()),
        )(
            x_BTD,
            jax.reshard(tokens.segments_BT, token_spec),
            self.router[...],
            tuple(w[...] for w in weights),
        )  # fmt: skip
        return checkpoint_name(out, "mlp_out"), auxiliary


def _moe(config: ModelConfig) -> MoEConfig:
    if config.moe is None:
        raise ValueError("model.moe is None; a mixture of experts needs a MoEConfig")
    if config.mlp_bias:
        raise ValueError("model.mlp_bias has no effect with model.moe; set model.mlp_bias=False")
    return config.moe


class _Layout:
    """What moves over which mesh axes, read off the active rules.

    Attributes:
        expert_axes: axes that split the experts.
        token_axes: axes over which a device's own tokens differ.
        exchanged: whether experts' rows are exchanged by all-to-all (`capacity`).
        tokens: how tokens and their outputs are split among the devices that share their work.
        choices: the same for the router's choices, which are nobody's partial sums.
        weights: the same for each weight.
        shared: devices that see one token's choice, to count it once.
    """

    def __init__(self, config: ModelConfig, names: list[tuple[str | None, ...]]):
        par = current()
        reduce = config.dtypes.reduce
        self.expert_axes = par.axes("experts")
        tokens = par.axes_of(("act_batch", "act_seq"))
        outside = [a for a in self.expert_axes if a not in tokens]
        if outside:
            raise ValueError(
                f"rule 'experts' -> {self.expert_axes} uses {outside}, which split no tokens; "
                "add them to the rule of 'act_batch', or map 'experts' to axes of it"
            )
        scattered = tuple(a for a in par.axes("act_residual_seq") if a not in tokens)
        self.token_axes = tokens + scattered
        self.exchanged = _moe(config).routing == "capacity" and bool(self.expert_axes)
        split = tuple(a for a in par.axes("mlp") if a not in tokens)
        gathers = tuple((a, 1) for a in reversed(scattered))
        if _moe(config).routing == "dropless":
            split += self.expert_axes
            in_batch = par.axes("act_batch")
            gathers += tuple((a, int(a not in in_batch)) for a in reversed(self.expert_axes))
        self.tokens = Moves(gathers=gathers, sums=split, reduce=reduce)
        self.choices = Moves(gathers=gathers)
        self.shared = math.prod(par.sizes[a] for a, _ in gathers)
        rows = tuple(dict.fromkeys(tokens + split))
        self.weights = tuple(self._weight(n, rows, split, reduce) for n in names)

    def _weight(self, names, rows: tuple[str, ...], split: tuple[str, ...], reduce: str) -> Moves:
        axes = {dim: current().axes(name) for dim, name in enumerate(names)}
        stay = self.expert_axes + split
        gathers = tuple(
            (axis, dim) for dim in axes for axis in reversed(axes[dim]) if axis not in stay
        )
        return Moves(gathers=gathers, sums=tuple(a for a in rows if a not in stay), reduce=reduce)


def _local(config: ModelConfig, layout: _Layout, x_BTD, segments_BT, router_DE, weights):
    """One device's part: route its tokens, work on those of its experts, sum."""
    moe, dtypes = _moe(config), config.dtypes
    with jax.named_scope("router"):
        choice = route(
            moe,
            x_BTD.reshape(-1, config.embed_dim),
            varying(router_DE.astype(dtypes.accumulate), vma(x_BTD)),
            segments_BT.reshape(-1) > 0,
        )
    grid = x_BTD.shape[:2] + (moe.num_experts_per_token,)
    with jax.named_scope("enter"):
        x_BTD = enter(layout.tokens, x_BTD)
        gates_KN = _flat(enter(layout.tokens, choice.gates_NK.reshape(grid)))
        experts_KN = _flat(layout.choices.whole(choice.experts_NK.reshape(grid)))
    with jax.named_scope("dispatch"):
        place, dropped = _place(moe, layout, experts_KN)
        rows = spread(x_BTD.reshape(-1, config.embed_dim), place)
        rows = rows.reshape(place.experts_B.size, -1, config.embed_dim)
    with jax.named_scope("experts"):
        experts = Experts(
            activation=config.activation,
            weights=layout.weights,
            skip_unused=moe.routing == "dropless" and bool(layout.expert_axes),
            accumulate=dtypes.accumulate,
        )
        owners = place.experts_B
        if layout.exchanged:
            rows = _exchange(rows, layout.expert_axes, 0, 1)
            owners = owners[: rows.shape[0]]
        rows = checkpoint_name(rows, "moe_rows")
        rows = apply_experts(experts, rows, owners, weights)
        if layout.exchanged:
            rows = _exchange(rows, layout.expert_axes, 1, 0)
        rows = checkpoint_name(rows, "moe_out")
    with jax.named_scope("combine"):
        out = collect(rows.reshape(-1, config.embed_dim), gates_KN, place)
        out = leave(layout.tokens, out.reshape(x_BTD.shape), x_BTD.dtype)
    return out, _auxiliary(config, layout, choice.sums, dropped)


def _flat(x_BTK: jax.Array) -> jax.Array:
    return x_BTK.reshape(-1, x_BTK.shape[-1]).T


def _exchange(rows: jax.Array, axes: tuple[str, ...], split: int, concat: int) -> jax.Array:
    return jax.lax.all_to_all(rows, axes, split_axis=split, concat_axis=concat, tiled=True)


def _place(
    moe: MoEConfig, layout: _Layout, experts_KN: jax.Array
) -> tuple[Placement, jax.Array | float]:
    """Rows of the pairs, and the number of pairs that found none."""
    num_choices, num_tokens = experts_KN.shape
    share = experts_KN.size / moe.num_experts
    if moe.routing == "capacity":
        capacity = min(math.ceil(moe.capacity_factor * share), num_tokens)
        place = place_with_capacity(experts_KN, moe.num_experts, capacity)
        return place, jnp.sum(experts_KN < moe.num_experts) - place.placed
    owned = moe.num_experts
    if layout.expert_axes:
        owned //= jax.lax.axis_size(layout.expert_axes)
        mine_KN = experts_KN - owned * jax.lax.axis_index(layout.expert_axes)
        experts_KN = jnp.where((mine_KN >= 0) & (mine_KN < owned), mine_KN, owned)
    block = block_rows(share)
    pairs = num_tokens * min(num_choices, owned)
    return place_all(experts_KN, owned, block, num_blocks(pairs, owned, block)), 0.0


def _auxiliary(
    config: ModelConfig, layout: _Layout, sums: jax.Array, dropped: jax.Array | float
) -> dict[str, jax.Array]:
    """Scalars over the whole batch, from each device's sums."""
    moe = _moe(config)
    share = jnp.asarray(dropped, sums.dtype) / layout.shared
    sums = jnp.concatenate([sums, share[None]])
    sums = jax.lax.psum(sums, layout.token_axes) if layout.token_axes else sums
    pairs = jnp.maximum(sums[-2] * moe.num_experts_per_token, 1)
    return losses(moe, sums[:-1]) | {"moe_dropped": sums[-1] / pairs / config.num_layers}
