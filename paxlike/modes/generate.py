"""`--mode=generate`: continue a prompt with a checkpoint, streaming to the terminal."""

import sys
import time
from pathlib import Path

import jax
import numpy as np

from meshes.presets import for_generation
from paxlike.checkpoint import load_params
from paxlike.config import Experiment
from paxlike.data.corpus import make_tokenizer
from paxlike.inference.generate import generate as generate_tokens
from paxlike.model import Model, Params, build_model
from paxlike.report import Measured, Report
from paxlike.runtime import here, runtime


def generate(experiment: Experiment, workdir: Path, *, prompt: str | None = None) -> Report:
    """Print the prompt and its continuation.

    Args:
        experiment: the run whose checkpoint in the workdir is used.
        workdir: folder of the run.
        prompt: in place of `inference.prompt`.

    Raises:
        ValueError: no usable checkpoint, or an empty prompt.
    """
    rules = for_generation(experiment.parallel.rule_table)
    with runtime(experiment, rules=rules):
        model = build_model(experiment)
        _, params = load_params(
            workdir / "checkpoints", model.abstract(), which=experiment.inference.checkpoint
        )
        text, measured = complete(
            experiment, model, params, prompt or experiment.inference.prompt, stream=True
        )
    return Report(
        experiment=experiment.name,
        mode="generate",
        target=here(),
        measured=measured,
        results={"prompt": prompt or experiment.inference.prompt, "generated": text},
    )


def complete(
    experiment: Experiment, model: Model, params: Params, prompt: str, *, stream: bool
) -> tuple[str, Measured]:
    """Continue one prompt under the active parallelism (rules `for_generation`).

    Args:
        experiment: says the tokenizer and how tokens are chosen.
        model: the model.
        params: its parameters.
        prompt: the text to continue.
        stream: print prompt and text as they come.

    Returns:
        The text after the prompt, and how fast it came (the prefill's compile time left out).
    """
    tokenizer = make_tokenizer(experiment.data)
    ids = [int(id) for id in tokenizer.encode(prompt)]
    if tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    written: list[int] = []
    times: list[float] = []
    shown = 0

    def on_tokens(new: np.ndarray) -> None:
        nonlocal shown
        times.append(time.perf_counter())
        written.append(int(new[0]))
        text = tokenizer.decode(written)
        # The last character may be half a code point until more bytes come.
        if stream and not text.endswith("\ufffd"):
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)

    if stream and jax.process_index() == 0:
        sys.stdout.write(prompt)
    generate_tokens(
        model, params, [ids], experiment.inference,
        vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, seed=experiment.seed,
        on_tokens=on_tokens,
    )  # fmt: skip
    if stream:
        sys.stdout.write("\n")
    # The first two tokens carry the compilation of prefill and step.
    steady = times[2:]
    rate = (len(steady) - 1) / (steady[-1] - steady[0]) if len(steady) > 2 else None
    return tokenizer.decode(written), Measured(tokens_per_second=rate)
