"""Weights of other codebases: against their own implementation, and damaged ones."""

import json

import jax
import numpy as np
import pytest

from layers.config import FLOAT32
from paxlike.interop.families import FAMILIES, LLAMA
from paxlike.interop.hf_config import from_model
from paxlike.interop.loading import plan, tensors
from paxlike.interop.pretrained import read_config, read_params
from paxlike.interop.safetensors import write
from paxlike.model import Model
from tests.helpers import BATCH, LENGTH, TINY, by_path, disturbed, on_mesh, put

MESHES = {"one device": {}, "2 x 4": {"fsdp": 2, "tensor": 4}}

SIZES = dict(
    vocab_size=48, num_hidden_layers=3, hidden_size=16, num_attention_heads=8,
    num_key_value_heads=4, head_dim=4, intermediate_size=32, max_position_embeddings=64,
    initializer_range=0.3,
)  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip
CASES = {
    "llama": ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=6)),
    "llama tied": ("llama", dict(tie_word_embeddings=True)),
    "llama3 scaling": ("llama", dict(rope_parameters=LLAMA3)),
    "yarn": ("llama", dict(rope_parameters=YARN)),
    "mistral": ("mistral", dict(sliding_window=5)),
    "qwen2": ("qwen2", dict(hidden_size=32, head_dim=None)),
    "qwen3": ("qwen3", dict(attention_bias=True)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5)),
    "gemma": ("gemma", dict()),
}


def logits(folder, tokens, axes):
    with on_mesh("fsdp_tp", **axes) as par:
        model = Model(read_config(folder, FLOAT32))
        params = read_params(folder, model)
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
        batch = put(par, {"t": tokens, "p": positions, "s": np.ones_like(tokens)})

        def forward(params, batch):
            decoder = model.bind(params)
            return decoder.logits(decoder(batch["t"], batch["p"], batch["s"])[0])

        return np.asarray(jax.jit(forward)(params, batch))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, mesh, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, changes = CASES[case]
    torch.manual_seed(0)
    settings = {k: v for k, v in {**SIZES, **changes}.items() if v is not None}
    config = transformers.AutoConfig.for_model(kind, **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for x in theirs.parameters():
            x.add_(0.1 * torch.randn_like(x))
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 48, (BATCH, LENGTH)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits(tmp_path, tokens, MESHES[mesh]), expected, atol=1e-4, rtol=0)


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint of a tiny model, and its parameters by path."""
    with on_mesh():
        params = disturbed(Model(TINY).init(jax.random.key(0)))
        steps = [tensor for _, tensor in plan(params, LLAMA.table)]
        write(tmp_path, steps, (x for _, x in tensors(params, LLAMA.table)), shard_bytes=4000)
    (tmp_path / "config.json").write_text(json.dumps(from_model(TINY, LLAMA)))
    return tmp_path, by_path(params)


def restore(folder, axes):
    with on_mesh("fsdp_tp", **axes):
        return by_path(read_params(folder, Model(read_config(folder, FLOAT32))))


@pytest.mark.parametrize("mesh", MESHES)
def test_round_trip_is_bit_equal_on_every_mesh(folder, mesh):
    path, expected = folder
    restored = restore(path, MESHES[mesh])
    assert restored.keys() == expected.keys()
    assert all(np.array_equal(restored[name], expected[name]) for name in expected)


def test_damaged_folders_are_refused_by_name(folder):
    path, _ = folder
    file = sorted(path.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"{file.name} is cut off within tensor"):
        restore(path, {})
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        restore(path, {})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_hidden_layers=4), r"'model.layers.3.* is missing"),
        (dict(num_hidden_layers=2), r"'model.layers.2.* has no place"),
        (dict(intermediate_size=64), r"mlp.gate_proj.weight' .* has shape \(32, 16\)"),
        (dict(tie_word_embeddings=True), "another than 'model.embed_tokens.weight'"),
        (dict(model_type="bloom"), "bloom"),
        (dict(hidden_act="relu"), "hidden_act is 'relu'"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
    ],
)
def test_a_config_that_lies_or_asks_too_much(folder, change, message):
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        restore(path, {})


def test_pickled_weights_are_never_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(from_model(TINY, LLAMA)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pickled"):
        restore(tmp_path, {})


def test_every_family_is_compared():
    assert {kind for kind, _ in CASES.values()} == set(FAMILIES)
