"""Generation with a key/value cache: one compiled prefill, one compiled step, many prompts.

Rows are independent, so every axis that splits batch or sequence holds different rows
(`meshes.presets.for_generation`); the tensor axis splits heads as in training. The host reads a
token while the next step already runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layers.tokens import Cache
from meshes.context import current
from paxlike.config import InferenceConfig
from paxlike.inference.sampling import sample
from paxlike.model import Model, Params

# Prompts are padded to a multiple of this, so that few lengths are compiled.
_PROMPT_BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """Tokens that continue one prompt; the end-of-text token, if reached, is the last."""

    tokens: tuple[int, ...]
    finished: bool


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    config: InferenceConfig,
    *,
    vocab_size: int,
    eos_id: int | None = None,
    seed: int = 0,
    on_tokens: Callable[[np.ndarray], None] | None = None,
) -> list[Generated]:
    """Continue prompts, all together.

    Args:
        model: the model, made under a parallelism whose rules are `for_generation`.
        params: its parameters.
        prompts: token ids of each prompt; at least one token each.
        config: how many tokens, and how they are chosen.
        vocab_size: tokens that the tokenizer knows.
        eos_id: token that ends a text; None never ends one.
        seed: of sampling.
        on_tokens: called with the new token [B] of every prompt as it comes, for streaming; -1
            for a prompt that has ended.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or a text longer than the
            model's learned positions.
    """
    lengths = _check(model, prompts, config, vocab_size)
    rows = -(-len(prompts) // current().ways("act_batch")) * current().ways("act_batch")
    width = -(-max(lengths) // _PROMPT_BLOCK) * _PROMPT_BLOCK
    ids, real = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
    for row in range(rows):
        prompt = prompts[min(row, len(prompts) - 1)]
        ids[row, : len(prompt)], real[row, : len(prompt)] = prompt, 1
    ends = jnp.asarray(real.sum(axis=1), jnp.int32)
    steps = _Steps(model, config, vocab_size)
    # Not split into so many: a row's key must not depend on how many the mesh adds.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(rows))
    cache = steps.empty(rows, width + config.max_new_tokens)
    token, cache = steps.prefill(params, cache, ids, real, ends, keys)
    alive = np.ones(len(prompts), bool)
    texts: list[list[int]] = [[] for _ in prompts]
    for n in range(config.max_new_tokens):
        read, position = token, ends + n
        if n + 1 < config.max_new_tokens:
            token, cache = steps.step(params, cache, read, position, keys)
        new = np.where(alive, np.asarray(read)[: len(prompts)], -1)
        for row in np.flatnonzero(alive):
            texts[row].append(int(new[row]))
        if on_tokens is not None:
            on_tokens(new)
        alive &= new != eos_id
        if not alive.any():
            break
    return [
        Generated(tokens=tuple(text), finished=not going)
        for text, going in zip(texts, alive, strict=True)
    ]


def _check(
    model: Model, prompts: Sequence[Sequence[int]], config: InferenceConfig, vocab_size: int
) -> list[int]:
    if not prompts:
        raise ValueError("no prompt is given; expected at least one")
    lengths = [len(prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; expected at least one token")
        outside = next((id for id in prompt if not 0 <= id < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"prompt {number} has the token {outside}; the vocabulary has {vocab_size}"
            )
    longest = max(lengths) + config.max_new_tokens
    if model.config.position == "learned" and longest > model.config.max_position:
        raise ValueError(
            f"prompt and answer make {longest} tokens, but model.max_position is "
            f"{model.config.max_position}; shorten the prompt or inference.max_new_tokens"
        )
    return lengths


class _Steps:
    """The compiled functions of one model and one way of sampling."""

    def __init__(self, model: Model, config: InferenceConfig, vocab_size: int):
        self._model, self._config, self._vocab_size = model, config, vocab_size
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.step = jax.jit(self._step, donate_argnums=1)

    def empty(self, rows: int, length: int) -> Cache:
        return jax.jit(functools.partial(self._model.empty_cache, rows, length))()

    def _prefill(
        self, params: Params, cache: Cache, ids_BT: Any, real_BT: Any, ends_B: Any, keys_B: Any
    ) -> tuple[jax.Array, Cache]:
        positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1])[None], ids_BT.shape)
        return self._read(params, cache, ids_BT, positions_BT, real_BT, ends_B, keys_B)

    def _step(
        self, params: Params, cache: Cache, token_B: Any, position_B: Any, keys_B: Any
    ) -> tuple[jax.Array, Cache]:
        ones = jnp.ones_like(token_B)
        return self._read(
            params, cache, token_B[:, None], position_B[:, None], ones[:, None], ones, keys_B,
            after=position_B,
        )  # fmt: skip

    def _read(
        self, params: Params, cache: Cache, ids_BT: Any, positions_BT: Any, real_BT: Any,
        lengths_B: Any, keys_B: Any, after: Any = None,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        """Read tokens and choose the next; its key comes from the position that it follows."""
        tokens, rows = current().spec(("act_batch", "act_seq")), current().spec(("act_batch",))
        ids_BT, positions_BT, real_BT = (
            jax.reshard(x.astype(jnp.int32), tokens) for x in (ids_BT, positions_BT, real_BT)
        )
        last_B = jax.reshard(lengths_B - 1, rows)
        logits_BV, cache = self._model.extend(params, cache, ids_BT, positions_BT, real_BT, last_B)
        logits_BV = jax.reshard(logits_BV, jax.P(None, None))
        after = lengths_B - 1 if after is None else after
        keys_B = jax.vmap(jax.random.fold_in)(keys_B, after)
        return sample(logits_BV, keys_B, self._config, self._vocab_size), cache
