"""Products of sharded operands equal plain einsums, whatever the three layouts are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.collectives.matmul import Projection, Reduction, plan, project

AXES = ("x", "y", "z")
EQUATIONS = ("btd,df->btf", "btd,fd->btf", "btd,dnh->bnth", "bnth,nhd->btd")
SIZE = 8  # of every dimension: all three axes of size 2 may split one


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)


def is_split_error(error: ValueError) -> bool:
    return "interleave its blocks" in str(error)


def check(equation: str, x_spec: P, w_specs: tuple[P, ...], y_specs: tuple[P, ...]) -> None:
    """Compare results and both gradients with those of a plain einsum in float32.

    Operands are small integers, so that every sum is exact in any order: no tolerance.
    """
    letters_x, letters_w = equation.split("->")[0].split(",")
    random = np.random.default_rng(0)
    draw = lambda letters: random.integers(-4, 5, (SIZE,) * len(letters)).astype(np.float32)
    x, ws = draw(letters_x), tuple(draw(letters_w) for _ in w_specs)
    plain = lambda x, ws: tuple(jnp.einsum(equation, x, w) for w in ws)
    expected, pull = jax.vjp(plain, x, ws)
    cotangents = tuple(draw(equation.split("->")[1]) for _ in w_specs)
    projection = Projection((equation,) * len(ws), x_spec, w_specs, y_specs)
    devices = mesh()
    place = lambda value, spec: jax.device_put(value, NamedSharding(devices, spec))
    with jax.set_mesh(devices):

        @jax.jit
        def ours(x, ws, cotangents):
            results, pull = jax.vjp(lambda x, ws: project(projection, x, ws), x, ws)
            return results, pull(cotangents)

        results, gradients = ours(
            place(x, x_spec),
            tuple(place(w, spec) for w, spec in zip(ws, w_specs, strict=True)),
            tuple(place(c, spec) for c, spec in zip(cotangents, y_specs, strict=True)),
        )
        for y, spec in zip(results, y_specs, strict=True):
            assert y.sharding.is_equivalent_to(NamedSharding(devices, spec), y.ndim)
    jax.tree.map(np.testing.assert_array_equal, (results, gradients), (expected, pull(cotangents)))


@st.composite
def layouts(draw, rank: int) -> P:
    """Each axis splits one dimension or none, in any order."""
    split: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(AXES)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            split[dim].append(axis)
    return P(*(tuple(axes) if axes else None for axes in split))


@st.composite
def products(draw, num_weights: int = 1):
    equation = draw(st.sampled_from(EQUATIONS))
    operands, result = equation.split("->")
    x, w = operands.split(",")
    return (
        equation,
        draw(layouts(len(x))),
        tuple(draw(layouts(len(w))) for _ in range(num_weights)),
        tuple(draw(layouts(len(result))) for _ in range(num_weights)),
    )


def right_or_refused(product) -> None:
    try:
        check(*product)
    except ValueError as error:
        if not is_split_error(error):
            raise
        assume(False)


X_THEN_Y, Y_THEN_X = ("x", "y"), ("y", "x")


# Data, tensor, Megatron sequence and fully sharded parallelism, and axes in another order.
LEGAL = (
    (P("x"), P(), P("x")),
    (P("x"), P(None, "z"), P("x", None, "z")),
    (P("x", "z"), P(None, "z"), P("x", None, "z")),
    (P(X_THEN_Y), P("y", "z"), P(X_THEN_Y, None, "z")),
    (P(X_THEN_Y), P(Y_THEN_X), P(X_THEN_Y)),
    (P(X_THEN_Y), P(X_THEN_Y), P(X_THEN_Y)),
    (P(None, None, Y_THEN_X), P(Y_THEN_X), P(X_THEN_Y)),
    (P("x"), P(), P(X_THEN_Y)),
)


@pytest.mark.parametrize("x, w, y", LEGAL)
def test_layouts_that_must_not_be_refused(x, w, y):
    check("btd,df->btf", x, (w,), (y,))


def test_an_input_is_gathered_once_for_all_its_weights():
    """Also where one result must know the copies to be equal (key/value heads kept whole)."""
    equations = ("btd,df->btf",) * 3
    weights = (P(None, "z"), P(), P(None, "z"))
    results = (P("x", None, "z"), P("x"), P("x", None, "z"))
    projection = Projection(equations, P("x", "z"), weights, results)
    shape = jax.ShapeDtypeStruct
    x, w = shape((SIZE,) * 3, jnp.float32), shape((SIZE,) * 2, jnp.float32)
    with jax.set_mesh(mesh()):
        place = lambda s, spec: shape(s.shape, s.dtype, sharding=NamedSharding(mesh(), spec))
        traced = jax.make_jaxpr(lambda x, ws: project(projection, x, ws))(
            place(x, P("x", "z")), tuple(place(w, spec) for spec in weights)
        )
    assert len(re.findall(r"all_gather\w*\[", str(traced))) == 1
    check(equations[0], P("x", "z"), weights, results)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(products())
def test_any_layout_gives_the_plain_product_and_gradients(product):
    right_or_refused(product)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(products(num_weights=2))
def test_several_weights_of_one_input(product):
    right_or_refused(product)


@pytest.mark.parametrize(
    "x, w, y",
    [
        (P(("x", "y")), P(), P("y")),
        (P(("x", "y")), P(), P(("y", "x"))),
        (P(None, None, ("x", "y")), P(("y", "x")), P()),
        (P("y"), P(), P(("x", "y"))),
    ],
    ids=["gather_major", "reordered", "contracted_in_another_order", "slice_major"],
)
def test_interleaved_blocks(x, w, y):
    """Class of complaints: a layout that two places read in another order, and wrong numbers."""
    with pytest.raises(ValueError, match=r"btd,df->btf: dimension '[bd]' .* interleave its blocks"):
        plan("btd,df->btf", x, w, y)


def collectives(equation: str, x: P, w: P, y: P) -> dict[str, object]:
    product = plan(equation, x, w, y)
    gathers = {f"{'xw'[i]}:{m.axis}" for i in (0, 1) for m in product.gathers[i]}
    slices = {f"{'xw'[i]}:{m.axis}" for i in (0, 1) for m in product.slices[i]}
    return {"gathers": gathers, "slices": slices, "reduction": product.reduction}


def test_collectives_of_the_classic_strategies():
    """The table of the module: nothing is exchanged that the layouts do not ask for."""
    up, down, nothing = "btd,df->btf", "btf,fd->btd", Reduction()
    none = {"gathers": set(), "slices": set()}
    # Tensor parallelism: nothing into the block, an all-reduce out of it.
    assert collectives(up, P("x"), P(None, "z"), P("x", None, "z")) == {
        **none, "reduction": nothing
    }  # fmt: skip
    assert collectives(down, P("x", None, "z"), P("z"), P("x")) == {
        **none, "reduction": Reduction(sums=("z",))
    }  # fmt: skip
    # Megatron sequence parallelism: all-gather in, reduce-scatter out.
    assert collectives(up, P("x", "z"), P(None, "z"), P("x", None, "z")) == {
        "gathers": {"x:z"}, "slices": set(), "reduction": nothing
    }  # fmt: skip
    assert collectives(down, P("x", None, "z"), P("z"), P("x", "z")) == {
        **none, "reduction": Reduction(scatters=(("z", 1),))
    }  # fmt: skip
    # FSDP: the weight is gathered; its gradient, over the same axis, reduce-scattered.
    assert collectives(up, P("x"), P("x"), P("x")) == {
        "gathers": {"w:x"}, "slices": set(), "reduction": nothing
    }  # fmt: skip
    assert collectives("btd,btf->df", P("x"), P("x"), P("x")) == {
        **none, "reduction": Reduction(scatters=(("x", 0),))
    }  # fmt: skip
