"""The model as pure functions of its parameters: what training, inference and analysis share.

The NNX graph is split once; what moves through jit is the plain state of parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from layers.attention.layer import empty_cache
from layers.config import ModelConfig
from layers.decoder import Decoder
from layers.tokens import Cache
from meshes.context import current
from paxlike.config import Experiment
from paxlike.describe import check_promise

Params = Any
Batch = dict[str, jax.Array]

TOKEN_NAMES = ("act_batch", "act_seq")


class Model:
    """A decoder under the active parallelism.

    Every method must be called under the parallelism under which the model was made.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        # The key is made while tracing: the mesh's devices may exist for compilation only.
        self._abstract = jax.eval_shape(lambda: self._construct(jax.random.key(0)))
        self.graphdef = nnx.graphdef(
            nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=jax.random.key(0))))
        )

    def _construct(self, key: jax.Array) -> Params:
        return nnx.state(Decoder(self.config, rngs=nnx.Rngs(params=key)), nnx.Param)

    def abstract(self) -> Params:
        """Shapes, dtypes and shardings of the parameters; nothing is allocated."""
        return self._abstract

    def init(self, key: jax.Array) -> Params:
        """Make parameters: born sharded, and bitwise the same on every mesh."""
        return jax.jit(self._construct)(key)

    def bind(self, params: Params) -> Decoder:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params)

    def loss_sum(self, params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Objective summed over tokens: micro-batches add up to their batch.

        Args:
            params: parameters.
            batch: tokens, targets, segment_ids, positions (int32) and loss_weights (float32),
                each [B, T], (act_batch, act_seq).

        Returns:
            Sum of weighted token losses, with auxiliary losses times the sum of weights; and sums:
            `loss` (cross entropy alone), `weights`, and each auxiliary scalar times `weights`.
        """
        decoder = self.bind(params)
        hidden, _, auxiliary = decoder(batch["tokens"], batch["positions"], batch["segment_ids"])
        objective, loss, weights = decoder.loss(hidden, batch["targets"], batch["loss_weights"])
        sums = {name: value * weights for name, value in auxiliary.items()}
        for name, value in sums.items():
            if name.endswith("_loss"):
                objective = objective + value
        return objective, {"loss": loss, "weights": weights, **sums}

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Objective a token, and metrics a token (`weights` stays the sum); see `loss_sum`."""
        objective, sums = self.loss_sum(params, batch)
        return objective / _divisor(sums["weights"]), mean_metrics(sums)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """An empty key/value cache for `batch` rows of up to `length` tokens."""
        return empty_cache(self.config, batch, length)

    def extend(
        self, params: Params, cache: Cache, ids_BT: jax.Array, positions_BT: jax.Array,
        segments_BT: jax.Array, last_B: jax.Array,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        """Read T more tokens a row (a prompt, or one token) and predict the next.

        Args:
            params: parameters.
            cache: keys and values of the tokens before.
            ids_BT: int32 tokens.
            positions_BT: int32, consecutive in each row.
            segments_BT: 1 for tokens, 0 for padding at the end.
            last_B: int32 index, among the T, of each row's last token.

        Returns:
            Logits [B, V] after that token, (act_batch, -), and the cache.
        """
        decoder = self.bind(params)
        hidden, extended, _ = decoder(ids_BT, positions_BT, segments_BT, cache)
        assert extended is not None
        last = jnp.take_along_axis(hidden, last_B[:, None, None], axis=1)
        logits = decoder.logits(last)[:, 0]
        return jax.reshard(logits, current().spec(("act_batch", None))), extended


def build_model(experiment: Experiment) -> Model:
    """Make the experiment's model under the active parallelism, its strategy's promise checked.

    Raises:
        ValueError: the rules cannot lay the parameters out, or a preset that claims to split them
            leaves more than 2 % of their bytes whole.
    """
    model = Model(experiment.model)
    if isinstance(experiment.parallel.rules, str):
        check_promise(model.abstract(), experiment.parallel.rules)
    return model


def mean_metrics(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Turn sums over tokens into means; `weights` stays."""
    weights = _divisor(sums["weights"])
    means = {name: value / weights for name, value in sums.items() if name != "weights"}
    return {**means, "weights": sums["weights"]}


def _divisor(weights: jax.Array) -> jax.Array:
    """The sum of weights; 1 where nothing counts, so that the mean is 0."""
    return jnp.where(weights > 0, weights, 1)
