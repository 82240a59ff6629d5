"""What the devices exchange in one evaluation of loss and gradients: all of it, counted.

Counts are operands in the compiled program, loops multiplied, bytes those of the whole tensor that
is gathered or reduced. Each test states the whole table, so that one collective more, of any kind,
anywhere, fails it. The formulas are those of Megatron-LM (arXiv 1909.08053), Korthikanti et al.
(2205.05198), ZeRO (1910.02054) and FSDP (2304.11277).
"""

import collections

import jax
import pytest

from layers.schemes import Schemes
from paxlike.analysis import collectives as counting
from paxlike.model import Model
from tests import helpers
from tests.helpers import BATCH, LENGTH, TINY, run

L = TINY.num_layers
TOKENS = BATCH * LENGTH
A = TOKENS * TINY.embed_dim * 4  # one hidden activation of all tokens, bytes
QKV, OUT = "layer.attention.qkv", "layer.attention.out"
UP, DOWN = "layer.mlp.up", "layer.mlp.down"
NORMS = {"layer.attention": L, "layer.mlp": L, "final_norm": 1}  # scope -> number of scales
AR, AG, RS = "all-reduce", "all-gather", "reduce-scatter"


def size(*names: str) -> int:
    """Bytes of parameters, by the ends of their names."""
    return sum(x.nbytes for name, x in run(TINY).params.items() if name.endswith(names))


def matrices() -> dict[str, tuple[int, int]]:
    """Scope -> (number, bytes) of its matrices, over all layers."""
    return {
        QKV: (3 * L, size(".query", ".key", ".value")),
        OUT: (L, size(".out")),
        UP: (2 * L, size(".gate", ".up")),
        DOWN: (L, size(".down")),
    }


def norms(axes: tuple[str, ...]) -> dict:
    """Gradients of scales, which are whole on every device: one all-reduce each."""
    scale = TINY.embed_dim * 4
    return {(AR, axes, scope): (count, count * scale) for scope, count in NORMS.items()}


def table(hlo: str, mesh: dict[str, int]) -> dict:
    """(kind, mesh axes, scope) -> (operands, bytes of the whole tensors)."""
    found: dict = collections.defaultdict(lambda: (0, 0))
    for row in counting.table(hlo, mesh):
        assert row.exact
        key = (row.kind, row.mesh_axes, row.where)
        found[key] = (found[key][0] + row.count, found[key][1] + row.payload_bytes)
    return dict(found)


def counted(rules: str, schemes: Schemes | None = None, **axes: int) -> dict:
    ran = run(TINY, rules, schemes=schemes, **axes)
    return table(ran.hlo, ran.mesh)


def gradient_sums(axis: str) -> dict:
    """Every gradient summed over an axis that splits tokens, and the three sums of the loss."""
    expected = {(AR, (axis,), scope): found for scope, found in matrices().items()}
    expected[AR, (axis,), "embedding"] = (1, size("embedding"))
    expected[AR, (axis,), "head"] = (1 + 3, size("head") + 3 * 4)
    return expected | norms((axis,))


def test_data_parallelism_reduces_gradients_and_nothing_else():
    found = counted("dp", data=8)
    assert found == gradient_sums("data")
    everything = sum(x.nbytes for x in run(TINY).params.values())
    assert sum(sent for _, sent in found.values()) == everything + 3 * 4


def test_fsdp_gathers_each_weight_twice_and_scatters_its_gradient_once():
    """A layer: one gather forward, one backward, one reduce-scatter. The embedding and the head,
    whose gradients need no second look at them, are gathered once.
    """
    expected = norms(("fsdp",))
    for scope, (count, total) in matrices().items():
        expected[AG, ("fsdp",), scope] = (2 * count, 2 * total)
        expected[RS, ("fsdp",), scope] = (count, total)
    for scope in ("embedding", "head"):
        expected[AG, ("fsdp",), scope] = expected[RS, ("fsdp",), scope] = (1, size(scope))
    expected[AR, ("fsdp",), "head"] = (3, 3 * 4)
    assert counted("fsdp", fsdp=8) == expected


def test_hybrid_sharding_sums_shards_over_the_replicas():
    """Scatter inside a group, then all-reduce a group's share across groups."""
    found = counted("hsdp", data=2, fsdp=4)
    for scope, (count, total) in matrices().items():
        assert found.pop((AG, ("fsdp",), scope)) == (2 * count, 2 * total)
        assert found.pop((RS, ("fsdp",), scope)) == (count, total)
        assert found.pop((AR, ("data",), scope)) == (count, total // 4)
    for scope in ("embedding", "head"):
        assert found.pop((AG, ("fsdp",), scope)) == (1, size(scope))
        assert found.pop((RS, ("fsdp",), scope)) == (1, size(scope))
        assert found.pop((AR, ("data",), scope)) == (1, size(scope) // 4)
    assert found == norms(("data", "fsdp")) | {(AR, ("data", "fsdp"), "head"): (3, 3 * 4)}


def tensor_parallel(recomputed: int = 0) -> dict:
    """Two all-reduces of A a layer forward, two backward; embedding and head one each; three of
    [tokens] for the softmax of a split vocabulary.
    """
    return {
        (AR, ("tensor",), OUT): (L + recomputed, (L + recomputed) * A),
        (AR, ("tensor",), DOWN): (L, L * A),
        (AR, ("tensor",), QKV): (L, L * A),
        (AR, ("tensor",), UP): (L, L * A),
        (AR, ("tensor",), "embedding"): (1, A),
        (AR, ("tensor",), "head"): (1 + 3, A + 3 * TOKENS * 4),
    }


def test_tensor_parallelism():
    assert counted("tp", tensor=4) == tensor_parallel()


def test_full_recomputation_repeats_one_all_reduce_a_layer():
    """Not two, as in the formula: nothing in the backward pass of a layer reads its output."""
    assert counted("tp", Schemes(remat="full"), tensor=4) == tensor_parallel(recomputed=L)


def test_named_recomputation_repeats_no_collective():
    kept = Schemes(remat="named:attention_context,attention_out")
    assert counted("tp", kept, tensor=4) == tensor_parallel()


def test_megatron_sequence_parallelism():
    """10 (t-1)/t A a layer: the 8 of tensor parallelism, each all-reduce as a gather and a scatter,
    and 2 for the shards of the input that are kept and gathered again for the weights' gradients.
    """
    axes = ("tensor",)
    expected = norms(axes)
    for scope in (QKV, UP):  # gathers forward and for the weights' gradients; dx is scattered
        expected[AG, axes, scope] = (2 * L, 2 * L * A)
        expected[RS, axes, scope] = (L, L * A)
    for scope in (OUT, DOWN):  # the result is scattered; its gradient gathered
        expected[RS, axes, scope] = (L, L * A)
        expected[AG, axes, scope] = (L, L * A)
    expected[RS, axes, "embedding"] = expected[AG, axes, "embedding"] = (1, A)
    expected[RS, axes, "head"] = expected[AG, axes, "head"] = (1, A)
    expected[AR, axes, "head"] = (3, 3 * TOKENS * 4)
    found = counted("megatron_sp", tensor=4)
    assert found == expected
    sent = sum(total for (kind, _, scope), (_, total) in found.items() if scope in matrices())
    assert sent == 10 * L * A


def test_a_split_sequence_gathers_keys_and_values_once_a_layer():
    """And scatters their gradients; positions and documents of the keys are moved once in all."""
    keys = BATCH * LENGTH * TINY.num_kv_heads * TINY.head_dim * 4
    core = "layer.attention.core"
    expected = gradient_sums("seq")
    expected[RS, ("seq",), core] = (2 * L, 2 * L * keys)
    found = counted("dp", seq=8)
    moved_once = (2, 2 * TOKENS * 4)
    count, total = found.pop((AG, ("seq",), core))
    assert (count - moved_once[0], total - moved_once[1]) == (2 * L, 2 * L * keys)
    assert found == expected


def test_forward_pass_alone():
    """The evaluation of a split sequence and split heads: no gradient, no gradient's collective."""
    with helpers.on_mesh("megatron_sp", data=2, tensor=4) as par:
        model = Model(TINY)
        batch = helpers.put(par, helpers.random_batch())
        compiled = jax.jit(model.loss).lower(model.abstract(), batch).compile()
        found = table(compiled.as_text(), dict(par.sizes))
    expected = {(AR, ("data",), "head"): (3, 3 * 4)}
    for scope in (QKV, UP):
        expected[AG, ("tensor",), scope] = (L, L * A // 2)
    for scope in (OUT, DOWN):
        expected[RS, ("tensor",), scope] = (L, L * A // 2)
    expected[RS, ("tensor",), "embedding"] = (1, A // 2)
    expected[AG, ("tensor",), "head"] = (1, A // 2)
    expected[AR, ("tensor",), "head"] = (3, 3 * TOKENS * 4 // 2)
    assert found == expected


def test_chunks_of_the_loss_reduce_their_own_tokens_only():
    """32 tokens of a device in chunks of 10: 4 chunks, the last one filled up to 40."""
    found = counted("tp", Schemes(loss_chunk=10), data=4, tensor=2)
    assert found[AR, ("tensor",), "head"] == (1 + 3 * 4, A // 4 + 3 * 40 * 4)


@pytest.mark.parametrize(
    "rules, axes, allowed",
    [
        (
            "tp",
            dict(data=2, seq=2, tensor=2),
            {(AR, ("tensor",)), (AR, ("data", "seq")), (AG, ("seq",)), (RS, ("seq",))},
        ),
        (
            "fsdp_sp",
            dict(seq=2, fsdp=2, tensor=2),
            {
                *((kind, (axis,)) for kind in (AG, RS) for axis in ("fsdp", "seq", "tensor")),
                (AR, ("seq",)), (AR, ("tensor",)), (AR, ("fsdp", "seq")),
                (AR, ("fsdp", "seq", "tensor")),
            },
        ),
    ],
    ids=["quickstart", "everything"],
)  # fmt: skip
def test_mixed_meshes_add_up_their_parts(rules, axes, allowed):
    """Class of complaints: an involuntary resharding that no one asked for."""
    found = counted(rules, **axes)
    assert {(kind, over) for kind, over, _ in found} == allowed
    for scope, (count, _) in matrices().items():
        if rules == "fsdp_sp":
            assert found[AG, ("fsdp",), scope][0] == 2 * count
            assert found[RS, ("fsdp",), scope][0] == count
            assert found[AR, ("seq",), scope][0] == count
        else:
            assert found[AR, ("tensor",), scope][0] == L
            assert found[AR, ("data", "seq"), scope][0] == count
