"""Times of collectives against closed forms, with the catalogue's figures and ideal constants."""

import pytest

from meshes import targets
from paxlike.analysis.cost_model import CostModel
from paxlike.analysis.network import Network

IDEAL = CostModel(
    version="ideal", nvlink=1.0, network=1.0, pcie=1.0, ici=1.0, gpu_collective_seconds=0.0,
    tpu_collective_seconds=0.0,
)  # fmt: skip
GB = 10**9
NVLINK, INFINIBAND, ICI, DCN = 450e9, 50e9, 45e9, 3.125e9
HOP = 1e-6  # of a TPU link


def seconds(target, axes, kind, payload, names):
    network = Network.of(axes, targets.parse(target), IDEAL)
    size = 1
    for name in names:
        size *= axes[name]
    return network.seconds(kind, payload, names, size)


def test_data_parallel_all_reduce_is_a_ring():
    links, time = seconds("h100:8", {"data": 8}, "all-reduce", GB, ("data",))
    assert links == ("nvlink",)
    latency = 0.47e-6 * (2 * 3 + 2)  # a tree's depth there and back is less than the ring's 14
    assert time == pytest.approx(2 * 7 / 8 * GB / NVLINK + latency, rel=1e-9)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_gathers_take_half(kind):
    _, time = seconds("h100:8", {"fsdp": 8}, kind, GB, ("fsdp",))
    assert time == pytest.approx(7 / 8 * GB / NVLINK + 7 * 0.47e-6, rel=1e-9)


def test_across_hosts_each_gpu_sends_its_share():
    """8 x 8: an eighth of the tensor through each network card, 7/8 of that to other hosts."""
    links, time = seconds("h100:8x8", {"fsdp": 64}, "all-gather", GB, ("fsdp",))
    assert links == ("nvlink", "network")
    assert time == pytest.approx(7 / 8 * GB / 8 / INFINIBAND, rel=0.02)


def test_an_axis_of_one_gpu_a_host_uses_one_card():
    links, time = seconds("h100:8x8", {"data": 8, "tensor": 8}, "all-reduce", GB, ("data",))
    assert links == ("network",)
    assert time == pytest.approx(2 * 7 / 8 * GB / INFINIBAND, rel=0.01)
    assert seconds("h100:8x8", {"data": 8, "tensor": 8}, "all-reduce", GB, ("tensor",))[0] == (
        "nvlink",
    )


def test_gpus_without_nvlink_meet_over_pcie():
    assert seconds("rtx4090:4", {"data": 4}, "all-gather", GB, ("data",))[0] == ("pcie",)


def test_a_ring_sends_both_ways_and_a_line_one():
    """v5e closes an axis of 16; 8 or fewer are a line. The scaling book: X / (2 links)."""
    axes = {"data": 16, "tensor": 16}
    links, ring = seconds("v5e:16x16", axes, "all-gather", GB, ("data",))
    assert links == ("ici x",)
    assert ring == pytest.approx(15 / 16 * GB / (2 * ICI) + 8 * HOP, rel=1e-9)
    _, line = seconds("v5e:8x8", {"data": 8, "tensor": 8}, "all-gather", GB, ("data",))
    assert line == pytest.approx(7 / 8 * GB / ICI + 7 * HOP, rel=1e-9)


def test_two_torus_axes_add_up():
    links, time = seconds("v5e:16x16", {"fsdp": 256}, "all-gather", GB, ("fsdp",))
    assert links == ("ici x", "ici y")
    assert time == pytest.approx(255 / 256 * GB / (4 * ICI) + 16 * HOP, rel=1e-9)


def test_axes_that_split_a_torus_axis_share_it():
    """16 chips as 4 x 4: neighbours form lines; those 4 apart a ring that 4 groups share."""
    axes = {"outer": 4, "inner": 4, "rest": 16}
    _, inner = seconds("v5e:16x16", axes, "all-gather", GB, ("inner",))
    assert inner == pytest.approx(3 / 4 * GB / ICI + 3 * HOP, rel=1e-9)
    _, outer = seconds("v5e:16x16", axes, "all-gather", GB, ("outer",))
    assert outer == pytest.approx(3 / 4 * GB / (2 * ICI / 4) + 8 * HOP, rel=1e-9)


def test_all_to_all():
    """Switch: all but the own part. Ring: the book's V / (4 W), W both ways, V = n Y."""
    _, switched = seconds("h100:8", {"seq": 8}, "all-to-all", GB, ("seq",))
    assert switched == pytest.approx(7 / 8 * GB / NVLINK, rel=1e-3)
    _, ring = seconds("v5e:16x16", {"seq": 16, "x": 16}, "all-to-all", GB, ("seq",))
    assert ring == pytest.approx(16 * GB / (4 * 2 * ICI), rel=1e-3)
    _, hosts = seconds("h100:2x8", {"seq": 16}, "all-to-all", GB, ("seq",))
    assert hosts == pytest.approx(8 / 16 * GB / INFINIBAND, rel=1e-3)


def test_permute_sends_to_one_neighbour():
    _, near = seconds("v5e:16x16", {"seq": 16, "x": 16}, "collective-permute", GB, ("seq",))
    assert near == pytest.approx(GB / ICI, rel=1e-3)
    _, near = seconds("h100:2x8", {"seq": 2, "x": 8}, "collective-permute", GB, ("seq",))
    assert near == pytest.approx(GB / INFINIBAND, rel=1e-3)


def test_slices_meet_over_the_data_centre():
    """Two slices of 16 chips: within a slice first, then a sixteenth a chip between slices."""
    axes = {"data": 2, "fsdp": 16}
    links, time = seconds("2xv5e:4x4", axes, "all-reduce", GB, ("data",))
    assert links == ("dcn",)
    assert time == pytest.approx(GB / DCN, rel=1e-3)
    links, time = seconds("2xv5e:4x4", axes, "all-reduce", GB, ("data", "fsdp"))
    assert links == ("ici x", "ici y", "dcn")
    inside, outside = 2 * 15 / 16 * GB / (2 * ICI), GB / 16 / DCN
    assert time == pytest.approx(inside + outside, rel=1e-2)


def test_halves_of_a_chip_share_its_links():
    """64 tpu7x devices on 4 x 4 x 2: on the torus, half of X a half-chip over half its links."""
    links, time = seconds("tpu7x:4x4x4", {"fsdp": 128}, "all-gather", GB, ("fsdp",))
    assert links == ("chip", "ici x", "ici y", "ici z")
    torus, chip = 63 / 64 * GB / (6 * 90e9), 1 / 2 * GB / (6 * 90e9)
    assert time == pytest.approx(torus + chip, rel=1e-2)


def test_groups_that_are_no_axes_are_the_first_devices():
    network = Network.of({"data": 16}, targets.parse("h100:2x8"), IDEAL)
    assert network.seconds("all-gather", GB, ("?",), 4)[0] == ("nvlink",)


def test_a_mesh_of_another_size():
    with pytest.raises(ValueError, match="has 8 devices, but the target h100:4 has 4"):
        Network.of({"data": 8}, targets.parse("h100:4"))
