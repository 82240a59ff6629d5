"""Policies of rematerialisation keep what they say, and recompute nothing else."""

import jax
import pytest

from layers.config import MoEConfig
from layers.remat import PRODUCTS, rematerialise
from layers.schemes import Schemes
from paxlike.analysis import cost, hlo
from paxlike.model import Model
from tests import helpers
from tests.helpers import TINY, run, tiny

MOE = MoEConfig(num_experts=4, num_experts_per_token=2, expert_mlp_dim=24, routing="capacity")


def residual_bytes_a_layer(remat: str) -> float:
    """What the forward pass of one layer keeps for its backward pass; nothing is compiled."""

    def kept(num_layers: int) -> int:
        with helpers.on_mesh("fsdp_tp", Schemes(remat=remat)) as par:
            model = Model(tiny(num_layers=num_layers))
            batch = helpers.put(par, helpers.random_batch())

            def residuals(params):
                return jax.vjp(lambda p: model.loss(p, batch)[0], params)[1]

            leaves = jax.tree.leaves(jax.eval_shape(residuals, model.abstract()))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    return (kept(6) - kept(3)) / 3


def test_remat_policies_keep_what_they_say():
    """Class of complaints: a policy named `full` that saves everything."""
    tokens = helpers.BATCH * helpers.LENGTH
    params = sum(x[0].nbytes for n, x in run(TINY).params.items() if n.startswith("layers."))
    full = tokens * TINY.embed_dim * 4 + params
    assert residual_bytes_a_layer("full") == full
    context, up = TINY.num_heads * TINY.head_dim, TINY.mlp_dim
    named = residual_bytes_a_layer("named:attention_context,mlp_up")
    softmax = TINY.num_heads  # its log denominators, kept with the context
    assert named == full + tokens * (context + softmax + up) * 4
    products = context + 2 * TINY.num_kv_heads * TINY.head_dim + 2 * TINY.mlp_dim
    products += TINY.embed_dim  # of attention; nothing in a layer's backward pass reads the other
    assert residual_bytes_a_layer("dots") == full + tokens * products * 4
    assert residual_bytes_a_layer("none") > residual_bytes_a_layer("dots")


def flops(config, remat: str) -> int:
    """Of matrix products in a gradient, on one device."""
    with helpers.on_mesh("dp", Schemes(remat=remat)) as par:
        model = Model(config)
        batch = helpers.put(par, helpers.random_batch())
        grad = jax.jit(jax.grad(lambda params: model.loss(params, batch)[0]))
        return cost.flops(hlo.parse(grad.lower(model.abstract()).compile().as_text()))


@pytest.mark.parametrize(
    "config",
    [tiny(qk_norm=True, qkv_bias=True, num_layers=3), tiny(moe=MOE, num_layers=3)],
    ids=["norms_and_biases", "mixture"],
)
def test_kept_products_are_not_computed_again(config):
    """Norms and rotations come after the tagged products; the core is kept with its softmax."""
    tagged = [name for name in PRODUCTS if config.moe or not name.startswith("moe_")]
    everything = ",".join(["named:attention_context", *tagged])
    assert flops(config, everything) == flops(config, "none") < flops(config, "full")


@pytest.mark.parametrize("policy", ["named:mlp_up,atention_context", "offload:moe_rows"])
def test_a_name_that_no_layer_tags_is_refused(policy):
    """It would keep nothing, and cost as much as `full`."""
    with helpers.on_mesh("fsdp_tp", Schemes(remat=policy)) as par:
        model = Model(TINY)
        batch = helpers.put(par, helpers.random_batch())
        with pytest.raises(ValueError, match=r"no layer of this model tags; .*attention_context"):
            jax.eval_shape(model.loss, model.abstract(), batch)


def test_unknown_policy():
    with pytest.raises(ValueError, match="unknown remat policy 'fulll'"):
        rematerialise(lambda x: x, "fulll", in_scan=True)
