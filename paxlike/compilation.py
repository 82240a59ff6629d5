"""Ahead-of-time compilation of an experiment's steps, from shapes alone.

Nothing is allocated: parameters, optimizer state, batch and cache are shapes with layouts, and the
devices may exist for compilation only (`meshes.targets`). What comes back is what the compiler made
of it: the scheduled program and the memory that a device needs.
"""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from meshes.context import current
from paxlike.config import Experiment
from paxlike.model import Model
from paxlike.training.state import abstract_state, concrete, optimizer_of
from paxlike.training.step import abstract_batch, build_train_step

Step = Literal["train", "prefill", "decode"]

# The two ways in which the TPU compiler says so; "temporaries" means arguments and results too.
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = re.compile(
    rf"Used {_SIZE} of {_SIZE} hbm|\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A step to compile.

    Attributes:
        step: the jitted function.
        arguments: its abstract arguments.
        parts: category (`params`, `optimizer`, `batch`, `kv_cache`) -> abstract arrays.
    """

    step: Any
    arguments: tuple[Any, ...]
    parts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step.

    Attributes:
        text: the optimised, scheduled HLO.
        memory: category -> bytes of one device. `padding` is what the device's layouts add to the
            arguments, `outputs` what does not take an argument's place, `total` the sum.
        trace_seconds: time to trace and lower.
        compile_seconds: time of XLA; short where the compilation cache had the program.
    """

    text: str
    memory: Mapping[str, int]
    trace_seconds: float
    compile_seconds: float


class DoesNotFitError(Exception):
    """The compiler gave up because the program needs more memory than the device has.

    Attributes:
        needed_bytes: of one device.
        available_bytes: likewise.
    """

    def __init__(self, needed_bytes: int, available_bytes: int, message: str):
        super().__init__(message)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class XlaError(Exception):
    """The compiler failed for another reason; the message is all that it said."""


def inputs(experiment: Experiment, model: Model, step: Step) -> Inputs:
    """Build a step and the shapes of its arguments, under the active parallelism.

    Args:
        experiment: what is compiled. A generating step has `train.global_batch_size` rows and a
            cache of `data.sequence_length` tokens: `prefill` fills it, `decode` reads one more
            token a row.
        model: its model.
        step: which one.
    """
    if step == "train":
        optimizer = optimizer_of(model, experiment)
        state, batch = abstract_state(model, optimizer, experiment), abstract_batch(experiment)
        parts = {
            "params": state.params,
            "optimizer": (state.opt_state, state.ema, state.guard, state.step),
            "batch": batch,
        }
        train = build_train_step(model, optimizer, experiment)
        return Inputs(step=train, arguments=(state, batch), parts=parts)
    rows, length = experiment.train.global_batch_size, experiment.data.sequence_length
    params = concrete(model.abstract())
    cache = concrete(jax.eval_shape(functools.partial(model.empty_cache, rows, length)))
    width = length if step == "prefill" else 1
    ids = _integers((rows, width), "act_batch", "act_seq")
    batch = (ids, ids, ids, _integers((rows,), "act_batch"))
    options = dict(experiment.parallel.compiler_options) or None
    extend = jax.jit(model.extend, donate_argnums=1, compiler_options=options)
    return Inputs(
        step=extend,
        arguments=(params, cache, *batch),
        parts={"params": params, "kv_cache": cache, "batch": batch},
    )


def _integers(shape: tuple[int, ...], *names: str) -> jax.ShapeDtypeStruct:
    spec = current().spec(names, shape, "batch")
    sharding = jax.sharding.NamedSharding(current().mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def compile_step(given: Inputs, *, cached: bool = True) -> Program:
    """Compile a step for the devices of the active mesh.

    Args:
        given: from `inputs`.
        cached: take the program from JAX's compilation cache if it is there. For compile-only
            devices this must be False: JAX writes their programs, and then cannot read them.

    Raises:
        DoesNotFitError: the compiler checks the device's memory, and it does not suffice.
        XlaError: the compiler failed, or is of another version than JAX.
    """
    start = time.perf_counter()
    lowered = given.step.lower(*given.arguments)
    traced = time.perf_counter()
    try:
        with contextlib.nullcontext() if cached else _without_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        found = _TOO_LARGE.search(message)
        if "RESOURCE_EXHAUSTED" in message and found:
            needed, unit, available, other_unit = (x for x in found.groups() if x is not None)
            raise DoesNotFitError(
                int(float(needed) * _UNITS[unit]),
                int(float(available) * _UNITS[other_unit]),
                message,
            ) from error
        raise XlaError(message) from error
    done = time.perf_counter()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise XlaError(
            "jaxlib cannot read the program that the compiler's plugin made; install the plugin's "
            f"version that belongs to this jax ({jax.__version__}). {error}"
        ) from error
    return Program(
        text=text,
        memory=_memory(given, compiled.memory_analysis()),
        trace_seconds=traced - start,
        compile_seconds=done - traced,
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def argument_bytes(given: Inputs) -> dict[str, int]:
    """Bytes of each category of arguments on one device, by shape and layout alone."""
    return {part: sum(map(device_bytes, jax.tree.leaves(x))) for part, x in given.parts.items()}


def device_bytes(array: Any) -> int:
    """Bytes of a device's shard of an abstract array."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _memory(given: Inputs, stats: Any) -> dict[str, int]:
    arguments = argument_bytes(given)
    others = {
        "padding": stats.argument_size_in_bytes - sum(arguments.values()),
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    total = sum(arguments.values()) + sum(others.values())
    return arguments | {name: size for name, size in others.items() if size} | {"total": total}
