"""`--mode=compile`: what a step needs and does on hardware that need not be there.

Shows where each parameter lies, lowers and compiles one step for a target, from shapes alone, and
reports the memory of a device against its capacity, the collectives by mesh axis and scope, the
FLOPs, and the predicted time of the step. The table of parameters is also in `sharding.txt`; the
predicted timeline is in `trace/timeline.json` (open it in ui.perfetto.dev) and `timeline.png`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from meshes import targets
from meshes.context import Parallelism
from meshes.hardware import CATALOGUE, Hardware
from meshes.presets import for_generation
from meshes.targets import Target
from paxlike.analysis import hlo, liveness, trace
from paxlike.analysis.cost import stated
from paxlike.analysis.memory_model import verdict
from paxlike.analysis.model_flops import forward_flops, mean_context, training_flops
from paxlike.compilation import (
    DoesNotFitError,
    Inputs,
    Program,
    Step,
    XlaError,
    argument_bytes,
    compile_step,
    inputs,
)
from paxlike.config import Experiment
from paxlike.describe import describe
from paxlike.difference import diff
from paxlike.model import build_model
from paxlike.prediction import predict
from paxlike.report import Compute, Memory, PeakMemory, Report
from paxlike.runtime import here, runtime

STEPS: tuple[Step, ...] = ("train", "prefill", "decode")


def compile_(
    experiment: Experiment,
    workdir: Path,
    *,
    target: str | None = None,
    step: Step = "train",
    dump_hlo: bool = False,
    against: str | Path | None = None,
    quiet: bool = False,
) -> Report:
    """Compile one step and report on it.

    Args:
        experiment: what is compiled.
        workdir: folder of the run.
        target: hardware, as `meshes.targets` reads it; None is the devices of this process.
        step: `train`, `prefill` or `decode` (shapes as `paxlike.compilation.inputs` says).
        dump_hlo: write the compiled program to `<step>.hlo.txt` in the workdir.
        against: workdir of an earlier compile; the report says what changed since.
        quiet: print nothing.

    Raises:
        ValueError: `against` has no report of compile mode; target, mesh, rules and experiment do
            not fit each other; or XLA failed (all that it said is in `xla_error.txt` in the
            workdir). A model that does not fit into memory is no error: it is the report's verdict.
    """
    if step not in STEPS:
        raise ValueError(f"step is {step!r}; expected one of {', '.join(STEPS)}")
    earlier = None if against is None else _earlier(Path(against))
    workdir.mkdir(parents=True, exist_ok=True)
    place = None if target is None else targets.parse(target)
    devices = None if place is None else targets.devices(place)
    rules = None if step == "train" else for_generation(experiment.parallel.rule_table)
    with runtime(experiment, devices, rules) as active:
        model = build_model(experiment)
        sharding = describe(model.abstract())
        (workdir / "sharding.txt").write_text(f"{sharding}\n")
        if not quiet:
            print(sharding, flush=True)
        given = inputs(experiment, model, step)
        try:
            program = compile_step(given, cached=place is None or place.hardware is None)
        except DoesNotFitError as error:
            report = _too_large(experiment, step, place, given, error)
        except XlaError as error:
            raise _short(error, step, workdir) from error
        else:
            if dump_hlo:
                (workdir / f"{step}.hlo.txt").write_text(program.text)
            report = _report(experiment, step, place, given, program, active, workdir)
    if earlier is not None:
        report.changes = diff(earlier, report)
        if not report.changes:
            report.notes += (f"Nothing changed against {against}.",)
    if not quiet:
        print(report.markdown(), end="")
    return report


def _earlier(workdir: Path) -> Report:
    try:
        return Report.read(workdir, "compile")
    except FileNotFoundError:
        raise ValueError(
            f"against is {str(workdir)!r}, which has no report of compile mode; run "
            f"--mode=compile --workdir={workdir} first"
        ) from None


def _report(
    experiment: Experiment,
    step: Step,
    target: Target | None,
    given: Inputs,
    program: Program,
    active: Parallelism,
    workdir: Path,
) -> Report:
    flops = _model_flops(experiment, step)
    module = hlo.parse(program.text)
    kernels = stated(active.kernels)
    prediction = predict(module, active.mesh, target, model_flops=flops, kernels=kernels)
    title = f"{experiment.name}, {step} step on {target.text if target else here()}"
    trace.write(prediction.timeline, title, workdir / "trace" / "timeline.json")
    trace.plot(prediction.timeline, title, workdir / "timeline.png")
    notes = (*_notes(target), *active.remarks)
    if not prediction.timeline.exact:
        notes += ("A loop's trip count depends on data: its body is counted once.",)
    return Report(
        experiment=experiment.name,
        mode="compile",
        target=target.text if target else here(),
        memory=dataclasses.replace(
            _verdict(program.memory, target.hardware if target else None),
            peak=_peak(module, given, program),
        ),
        collectives=prediction.collectives,
        compute=Compute(
            flops_per_device=prediction.timeline.flops,
            model_flops=flops,
            hbm_bytes_per_device=prediction.timeline.hbm_bytes,
        ),
        predicted=prediction.predicted,
        results={
            "step": step,
            "trace_seconds": program.trace_seconds,
            "compile_seconds": program.compile_seconds,
        },
        notes=notes,
        plots=("timeline.png",),
    )


def _peak(module: hlo.Module, given: Inputs, program: Program) -> PeakMemory:
    params = jax.tree.leaves(given.parts["params"])
    shapes = {tuple(leaf.sharding.shard_shape(leaf.shape)) for leaf in params}
    sizes = program.memory
    compiler_bytes = sizes.get("temporaries", 0) + sizes.get("outputs", 0)
    return PeakMemory.of(liveness.peak(module, shapes), compiler_bytes)


def _verdict(per_device_bytes: Mapping[str, int], hardware: Hardware | None) -> Memory:
    if hardware is None:
        return Memory(per_device_bytes=per_device_bytes)
    return Memory(
        per_device_bytes=per_device_bytes,
        capacity_bytes=hardware.hbm_bytes,
        fits=verdict(per_device_bytes["total"], hardware.hbm_bytes),
    )


def _too_large(
    experiment: Experiment,
    step: Step,
    target: Target | None,
    given: Inputs,
    error: DoesNotFitError,
) -> Report:
    """The report of a program that the compiler gave up on: only its memory is known."""
    arguments = argument_bytes(given)
    others = error.needed_bytes - sum(arguments.values())
    memory = Memory(
        per_device_bytes=arguments | {"temporaries": others, "total": error.needed_bytes},
        capacity_bytes=error.available_bytes,
        fits="no",
    )
    return Report(
        experiment=experiment.name,
        mode="compile",
        target=target.text if target else here(),
        memory=memory,
        results={"step": step},
        notes=(*_notes(target), "The compiler found no way to fit the program into memory."),
    )


def _notes(target: Target | None) -> tuple[str, ...]:
    hardware = target.hardware if target else None
    if hardware is None or hardware.compiled_as is None:
        return ()
    relative = CATALOGUE[hardware.compiled_as]
    return (
        f"XLA has no target for {hardware.title}: the program is that of its relative "
        f"{relative.title}; capacity is {hardware.title}'s own.",
    )


def _model_flops(experiment: Experiment, step: Step) -> float:
    model, length = experiment.model, experiment.data.sequence_length
    rows = experiment.train.global_batch_size
    if step == "train":
        return training_flops(model, sequences=rows, length=length)
    if step == "prefill":
        context = mean_context(model, length)
        return forward_flops(model, tokens=rows * length, context=context, heads_of_output=rows)
    context = min(model.window or length, length)
    return forward_flops(model, tokens=rows, context=context)


def _short(error: XlaError, step: Step, workdir: Path) -> ValueError:
    path = workdir / "xla_error.txt"
    path.write_text(str(error))
    said = " ".join(str(error).split())[:300]
    return ValueError(f"XLA could not compile the {step} step: {said} (all of it: {path})")
