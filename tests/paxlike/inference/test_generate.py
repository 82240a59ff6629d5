"""Generation continues every prompt as the model alone would, token by token, on any mesh."""

import jax
import numpy as np
import pytest

from meshes.presets import for_generation, preset
from paxlike.config import InferenceConfig
from paxlike.inference.generate import generate
from paxlike.model import Model
from tests.helpers import TINY, disturbed, on_mesh, tiny

PROMPTS = [[5, 9, 40], [1], [7, 7, 7, 2, 30, 11, 4, 19, 21, 3, 8, 8, 1, 2, 3, 4, 5, 6]]
LONG = tiny(max_position=64)


def continued(config, prompts, inference, rules="dp", *, eos_id=None, seed=0, **axes):
    with on_mesh(for_generation(preset(rules)), **axes):
        model = Model(config)
        params = disturbed(model.init(jax.random.key(0)))
        streamed = []
        out = generate(
            model, params, prompts, inference, vocab_size=config.vocab_size, eos_id=eos_id,
            seed=seed, on_tokens=lambda tokens: streamed.append(tokens.tolist()),
        )  # fmt: skip
    return out, np.asarray(streamed)


def likeliest(config, prompt, count):
    """The oracle: the whole text through the model again for each new token, no cache."""
    with on_mesh() as par:
        model = Model(config)
        params = disturbed(model.init(jax.random.key(0)))
        sharding = jax.NamedSharding(par.mesh, par.spec(("act_batch", "act_seq")))

        @jax.jit
        def logits(ids, segments):
            decoder = model.bind(params)
            positions = jax.numpy.broadcast_to(jax.numpy.arange(32)[None], ids.shape)
            return decoder.logits(decoder(ids, positions, segments)[0])

        text = list(prompt)
        for _ in range(count):
            padded = np.zeros((1, 32), np.int32)
            padded[0, : len(text)] = text
            real = (np.arange(32)[None] < len(text)).astype(np.int32)
            put = lambda x: jax.device_put(x, sharding)
            text.append(int(np.argmax(logits(put(padded), put(real))[0, len(text) - 1])))
    return tuple(text[len(prompt) :])


GREEDY = InferenceConfig(max_new_tokens=10)


@pytest.mark.parametrize(
    ("rules", "axes"),
    [("dp", {}), ("tp", dict(data=2, tensor=2)), ("fsdp_sp", dict(seq=2, fsdp=2, tensor=2))],
    ids=["one_device", "split_heads", "sequence_mesh"],
)
def test_greedy_text_is_that_of_the_whole_model(rules, axes):
    out, streamed = continued(LONG, PROMPTS, GREEDY, rules, **axes)
    expected = [likeliest(LONG, prompt, 10) for prompt in PROMPTS]
    assert [g.tokens for g in out] == expected
    assert not any(g.finished for g in out)
    assert streamed.T.tolist() == [list(tokens) for tokens in expected]


def test_a_text_ends_with_its_end_token():
    expected = likeliest(LONG, PROMPTS[0], 10)
    eos = expected[4]
    out, streamed = continued(LONG, PROMPTS[:1], GREEDY, eos_id=eos)
    first = expected.index(eos)
    assert out[0].finished and out[0].tokens == expected[: first + 1]
    assert len(streamed) == first + 1


def test_sampling_depends_on_its_seed_alone():
    """Not on the mesh, nor on how many prompts there are."""
    warm = InferenceConfig(max_new_tokens=12, temperature=1.0, top_k=20, top_p=0.95)
    one, _ = continued(LONG, PROMPTS, warm, seed=3)
    meshed, _ = continued(LONG, PROMPTS, warm, "tp", seed=3, data=2, tensor=2)
    assert meshed == one
    assert continued(LONG, PROMPTS[:2], warm, seed=3)[0] == one[:2]
    again, _ = continued(LONG, PROMPTS, warm, seed=3)
    other, _ = continued(LONG, PROMPTS, warm, seed=4)
    assert again == one != other


@pytest.mark.parametrize(
    ("prompts", "config", "message"),
    [
        ([], LONG, "no prompt is given"),
        ([[]], LONG, "prompt 0 is empty"),
        ([[1], [TINY.vocab_size]], LONG, "prompt 1 has the token 48; the vocabulary has 48"),
        ([[1] * 8], tiny(position="learned"), "make 18 tokens, but model.max_position is 16"),
    ],
)
def test_what_cannot_be_continued(prompts, config, message):
    with pytest.raises(ValueError, match=message):
        continued(config, prompts, GREEDY)
