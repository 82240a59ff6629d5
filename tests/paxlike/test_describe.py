"""The sharding of a model on one screen, and strategies held to their claims."""

import jax
import pytest

from meshes.presets import FSDP_TP, SHARDS_PARAMETERS
from paxlike.describe import check_promise, describe, placements
from paxlike.model import Model
from tests.helpers import TINY, on_mesh, tiny

# Wide enough for norms to be a small share, as in any real model.
WIDE = tiny(embed_dim=128, mlp_dim=256, vocab_size=128)


def test_every_parameter_is_listed_with_its_bytes():
    with on_mesh("fsdp_tp", data=2, fsdp=2, tensor=2):
        params = Model(TINY).abstract()
        rows = {row.path: row for row in placements(params)}
        text = describe(params)
    query = next(row for path, row in rows.items() if path.endswith("query"))
    assert query.shape == (3, 16, 8, 4)
    assert query.names == ("layers", "embed", "q_heads", "head_dim")
    assert query.split == ((), ("fsdp",), ("tensor",), ())
    assert query.bytes_per_device == 3 * 16 * 8 * 4 * 4 // 4
    lines = text.splitlines()
    assert lines[0] == "mesh: data 2 x fsdp 2 x tensor 2"
    assert len(lines) == 2 + len(rows) + 1
    held = sum(row.bytes_per_device for row in rows.values())
    count = sum(x.size for x in jax.tree.leaves(params))
    assert lines[-1].split() == ["total:", f"{count:,}", "parameters", f"{held:,}"]
    for row in rows.values():
        assert any(row.path in line and f"{row.bytes_per_device:,}" in line for line in lines)


def test_bytes_are_those_of_the_arrays():
    with on_mesh("fsdp_sp", fsdp=2, tensor=2):
        model = Model(TINY)
        params = model.init(jax.random.key(0))
        on_first = sum(
            shard.data.nbytes
            for x in jax.tree.leaves(params)
            for shard in x.addressable_shards
            if shard.device == jax.devices()[0]
        )
        assert on_first == sum(row.bytes_per_device for row in placements(model.abstract()))


@pytest.mark.parametrize("preset", SHARDS_PARAMETERS)
def test_presets_keep_their_promise(preset):
    axes = dict.fromkeys(SHARDS_PARAMETERS[preset], 2)
    with on_mesh(preset, **axes):
        check_promise(Model(WIDE).abstract(), preset)


def test_a_broken_promise_names_what_stays_whole():
    """Class of complaints: parameters that silently stay replicated, seen as a late OOM."""
    with on_mesh(FSDP_TP.replace(mlp=None), fsdp=2, tensor=2):
        params = Model(WIDE).abstract()
        with pytest.raises(ValueError, match=r"split parameters over tensor=2, but \d\d\.\d%") as e:
            check_promise(params, "fsdp_tp")
    assert "mlp" in str(e.value)
