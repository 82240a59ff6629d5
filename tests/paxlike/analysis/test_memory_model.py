"""The closed form against worked figures, a pipeline played out event by event, its own laws."""

import dataclasses
import math

import pytest

from experiments.lm.config import llama2_7b, llama3_8b, llama3_70b
from layers.config import ModelConfig, MoEConfig
from meshes.axes import MeshShape
from meshes.presets import preset
from paxlike.analysis.memory_model import (
    PAPER,
    Layout,
    MicroBatch,
    chunks_in_flight,
    estimate,
    largest,
    layer_activations,
    layers_of,
    verdict,
)

SMALL = ModelConfig(
    vocab_size=512, num_layers=16, embed_dim=64, num_heads=16, num_kv_heads=8, head_dim=4,
    mlp_dim=128,
)  # fmt: skip
BATCH = MicroBatch(sequences=1, length=512, count=16)


def megatron(*, rules: str = "megatron_sp", zero1: bool = True, **values) -> Layout:
    """A layout by mesh axes and fields."""
    axes = {name: values.pop(name) for name in MeshShape().sizes if name in values}
    return Layout(mesh=MeshShape(**{"data": 1} | axes), rules=preset(rules), zero1=zero1, **values)


@pytest.mark.parametrize(
    ("model", "factor", "gigabytes"),
    [(llama3_8b().model, 41, 22.01), (llama3_70b().model, 40.5, 108.7),
     (llama2_7b().model, 37.5, 20.13)],
)  # fmt: skip
def test_activations_of_published_models(model, factor, gigabytes):
    batch = MicroBatch(sequences=1, length=4096)
    kept, again = layer_activations(model, megatron(), batch, PAPER)
    assert kept == factor * 4096 * model.embed_dim
    assert again == 0
    activations = estimate(model, megatron(), batch).activations
    assert activations == model.num_layers * kept
    assert activations / 1e9 == pytest.approx(gigabytes, rel=5e-4)


def test_the_worked_example_of_llama_70b():
    """t8 p4 d4, 8,192 tokens: 2,270,756,864 parameters in stage 0, of 6 + 12/4 bytes; 47.6 GB."""
    layout = megatron(tensor=8, pipeline=4, data=4)
    batch = MicroBatch(sequences=1, length=8192, count=4)
    first = estimate(llama3_70b().model, layout, batch)
    assert first.params + first.grads == 6 * 2_270_756_864
    assert first.optimizer == 3 * 2_270_756_864
    assert first.activations / 1e9 == pytest.approx(27.18, abs=5e-3)
    assert first.logits == first.buffers == 0
    assert first.total / 1e9 == pytest.approx(47.6, abs=0.05)
    assert verdict(first.total, 80e9) == "safe"
    last = estimate(llama3_70b().model, layout, batch, stage=3)
    hidden = 2 * 2 * 8192 * 8192 // 8
    assert last.logits == hidden + 6 * 8192 * 128_256 // 8


def play(limits: list[int], micro_batches: int, virtual: int) -> float:
    """Slots that a pipeline takes when stage s may hold `limits[s]` chunks' activations at a time;
    infinity where it stops.

    A pass of one chunk takes a slot, forward as backward. A stage does forward passes up to its
    limit and then, while there are any, a backward and a forward pass in turn; it waits for the
    next pass of Megatron's order (groups of p micro-batches, chunk by chunk) if it is not ready.
    """
    stages, last = len(limits), len(limits) * virtual - 1
    groups = range(0, micro_batches, stages)
    order = [
        (chunk, m)
        for group in groups
        for chunk in range(virtual)
        for m in range(group, min(group + stages, micro_batches))
    ]
    forward = [[(c * stages + s, m) for c, m in order] for s in range(stages)]
    backward = [[(last - (c * stages + s), m) for c, m in order] for s in reversed(range(stages))]
    done: dict[tuple[str, int, int], int] = {}
    slot = 0
    while any(backward):
        slot += 1
        for s, limit in enumerate(limits):
            held = len(backward[s]) - len(forward[s])
            if forward[s] and held < limit:
                chunk, m = forward[s][0]
                if chunk == 0 or done.get(("forward", chunk - 1, m), slot) < slot:
                    done["forward", *forward[s].pop(0)] = slot
            elif backward[s]:
                chunk, m = backward[s][0]
                before = ("forward", last, m) if chunk == last else ("backward", chunk + 1, m)
                if done.get(before, slot) < slot:
                    done["backward", *backward[s].pop(0)] = slot
        if slot > 10 * (last + 1) * micro_batches:
            return math.inf
    return slot


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 2), (4, 4), (4, 9), (8, 16)])
def test_micro_batches_in_flight_are_the_fewest_that_keep_a_pipeline_busy(stages, micro_batches):
    layout = megatron(pipeline=stages)
    limits = [chunks_in_flight(layout, micro_batches, stage) for stage in range(stages)]
    assert limits == [min(micro_batches, stages - stage) for stage in range(stages)]
    assert play(limits, micro_batches, 1) == 2 * (micro_batches + stages - 1)
    if limits[0] > 1:
        assert play([limits[0] - 1, *limits[1:]], micro_batches, 1) > play(limits, micro_batches, 1)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 2), (4, 4)])
def test_chunks_in_flight_of_an_interleaved_pipeline(stages, virtual):
    layout, micro_batches = megatron(pipeline=stages, virtual=virtual), 4 * stages
    limits = [chunks_in_flight(layout, micro_batches, stage) for stage in range(stages)]
    assert limits[0] == virtual * stages + stages - 1
    slots = play(limits, micro_batches, virtual)
    assert slots == 2 * (micro_batches * virtual + stages - 1)
    assert play([limit - 1 for limit in limits], micro_batches, virtual) == math.inf
    whole = estimate(SMALL, megatron(), BATCH).activations
    factor = 1 + (stages - 1) / (stages * virtual)
    assert estimate(SMALL, layout, BATCH).activations == whole * factor


def test_gpipe_holds_every_micro_batch():
    gpipe = megatron(pipeline=4, schedule="gpipe")
    one = megatron(pipeline=4)
    assert estimate(SMALL, gpipe, BATCH).activations == 4 * estimate(SMALL, one, BATCH).activations


@pytest.mark.parametrize("axis", ["tensor", "seq", "pipeline", "data", "fsdp"])
@pytest.mark.parametrize("remat", ["none", "full", "named:query,mlp_up"])
def test_more_devices_never_need_more(axis, remat):
    """FSDP from 2 on: the first split adds the gathered layer."""
    sizes = (2, 4, 8) if axis == "fsdp" else (1, 2, 4, 8)
    layouts = [megatron(rules="fsdp_sp", remat=remat, **{axis: size}) for size in sizes]
    totals = [largest(SMALL, layout, BATCH).total for layout in layouts]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)


@pytest.mark.parametrize("field", ["sequences", "length"])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_twice_the_tokens_are_twice_the_activations(field, remat):
    layout = megatron(pipeline=2, tensor=2, seq=2, remat=remat)
    twice = dataclasses.replace(BATCH, **{field: 2 * getattr(BATCH, field)})
    before = estimate(SMALL, layout, BATCH).activations
    assert estimate(SMALL, layout, twice).activations == 2 * before


def test_recomputation_keeps_inputs_and_one_layer():
    layer = layer_activations(SMALL, megatron(), BATCH, PAPER)[0]
    inputs = 2 * 512 * SMALL.embed_dim
    full = estimate(SMALL, megatron(remat="full"), BATCH).activations
    assert full == SMALL.num_layers * inputs + layer - inputs


def test_fsdp_splits_the_state_and_gathers_a_layer():
    """Norms stay whole; the gathered layer has no norms to gather that it does not hold."""
    model = llama3_8b().model
    batch = MicroBatch(sequences=1, length=4096)
    whole = estimate(model, megatron(rules="fsdp", zero1=False), batch)
    split = estimate(model, megatron(rules="fsdp", zero1=False, fsdp=8), batch)
    norms = 65 * 4096
    for name, width in (("params", 2), ("grads", 4), ("optimizer", 12)):
        matrices = getattr(whole, name) - width * norms
        assert getattr(split, name) == matrices // 8 + width * norms
    assert split.buffers == 2 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336 + 2 * 4096)
    assert whole.buffers == 0


def test_experts_are_split_over_their_axis_and_widen_activations():
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_mlp_dim=96)
    sparse = dataclasses.replace(SMALL, moe=moe)
    wide = dataclasses.replace(SMALL, mlp_dim=192)
    kept = layer_activations(sparse, megatron(), BATCH, PAPER)
    assert kept == layer_activations(wide, megatron(), BATCH, PAPER)
    experts = SMALL.num_layers * 8 * 3 * SMALL.embed_dim * 96
    one, four = (estimate(sparse, megatron(expert=n, zero1=False), BATCH) for n in (1, 4))
    assert one.params - four.params == 2 * experts * 3 // 4


def test_logits_exist_a_chunk_at_a_time():
    whole, chunk = (estimate(SMALL, megatron(loss_chunk=n), BATCH).logits for n in (0, 64))
    assert whole - chunk == 6 * (512 - 64) * SMALL.vocab_size


def test_edges_may_count_as_layers():
    model = dataclasses.replace(SMALL, num_layers=14)
    layout = megatron(pipeline=4, edges_as_layers=True)
    assert [layers_of(model, layout, stage) for stage in range(4)] == [3, 4, 4, 3]


def test_the_verdict_turns_at_80_and_at_100_per_cent():
    needed = largest(SMALL, megatron(), BATCH).total
    assert verdict(needed, needed / 0.8 * 1.0001) == "safe"
    assert verdict(needed, needed / 0.8 * 0.9999) == "try"
    assert verdict(needed, needed * 1.0001) == "try"
    assert verdict(needed, needed * 0.9999) == "no"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (megatron(pipeline=3), "num_layers is 16 .*multiple of pipeline=3"),
        (megatron(tensor=16), "'kv_heads' of size 8 does not divide over tensor=16"),
        (megatron(remat="named:attention"), "'attention', which the closed form does not know"),
        (megatron(remat="ful"), "remat is 'ful'; expected none, full"),
    ],
)
def test_what_does_not_divide_is_said(layout, message):
    with pytest.raises(ValueError, match=message):
        estimate(SMALL, layout, BATCH)


def test_layouts_without_meaning():
    with pytest.raises(ValueError, match="data=-1; expected the sizes resolved"):
        megatron(data=-1)
    with pytest.raises(ValueError, match="virtual is 2 with layout.schedule=gpipe"):
        megatron(virtual=2, schedule="gpipe")
    with pytest.raises(ValueError, match="loss_chunk is -1; expected at least 0"):
        megatron(loss_chunk=-1)
    with pytest.raises(ValueError, match="stage is 4; expected 0 to 3"):
        estimate(SMALL, megatron(pipeline=4), BATCH, stage=4)
