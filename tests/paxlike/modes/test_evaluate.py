"""`--mode=eval` against a plain sum over the documents on one device."""

import math

import jax
import numpy as np
import pytest

from meshes.axes import MeshShape
from paxlike.checkpoint import load_params
from paxlike.data.pipeline import build
from paxlike.model import Model
from paxlike.modes.evaluate import evaluate
from paxlike.modes.train import train
from paxlike.runtime import runtime
from paxlike.training.state import concrete
from tests.paxlike.training.tiny import experiment


@pytest.mark.parametrize("ema", [None, 0.5])
def test_evaluation_is_the_mean_over_the_split(ema, tmp_path):
    config = experiment(num_steps=4, ema_decay=ema)
    train(config, tmp_path, quiet=True)
    results = evaluate(config, tmp_path).results

    one = experiment(num_steps=4, ema_decay=ema, mesh=MeshShape())
    with runtime(one, jax.devices()[:1]):
        model = Model(one.model)
        part = "params" if ema is None else "ema"
        step, params = load_params(
            tmp_path / "checkpoints", concrete(model.abstract()), prefix=part
        )
        data = build(one.data, global_batch_size=1, split="eval", seed=0)
        loss = jax.jit(model.loss)
        sums = np.zeros(2)
        for row in data.epoch():
            _, metrics = loss(params, row)
            sums += [metrics["loss"] * metrics["weights"], metrics["weights"]]
    mean = sums[0] / sums[1]
    assert results["step"] == step == 4 and results["eval_tokens"] == sums[1]
    np.testing.assert_allclose(results["eval_loss"], mean, rtol=1e-5)
    np.testing.assert_allclose(results["eval_perplexity"], math.exp(mean), rtol=1e-4)
    info = results["data"]
    bits = mean / math.log(2) * info["tokens"] / info["bytes"]
    np.testing.assert_allclose(results["eval_bits_per_byte"], bits, rtol=1e-5)


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match="no usable checkpoint in .* train first"):
        evaluate(experiment(), tmp_path)
