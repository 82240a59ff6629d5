"""Declare once, compile anywhere, prove it.

    python -m paxlike.main --experiment=NAME --mode=MODE --workdir=DIR [--override=path=value ...]

Exit codes: 0 done; 2 your mistake, said in one line; 1 ours, with the traceback in the workdir's
error.txt.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from paxlike import launch, overrides, registry, workdir
from paxlike.config import Experiment
from paxlike.errors import expected_name, foreign_character, is_users_mistake, one_line

# Mode -> its function, imported when it is asked for.
MODES = {
    "train": "paxlike.modes.train:train",
    "eval": "paxlike.modes.evaluate:evaluate",
    "generate": "paxlike.modes.generate:generate",
    "compile": "paxlike.modes.compile:compile_",
}

# Modes that take several experiments -> the function that compares them.
COMPARING = {"compile": "paxlike.modes.compare:compare"}

# A namespace of our own: the flags of imported libraries are neither parsed nor listed.
FLAGS = flags.FlagValues()


def _flag(define: Callable[..., Any], name: str, default: Any, *args: Any) -> None:
    define(name, default, *args, flag_values=FLAGS, module_name="paxlike")


_flag(
    flags.DEFINE_string,
    "experiment",
    None,
    "Name of the experiment (compile: a,b,c compares them); else the workdir's own.",
)
_flag(flags.DEFINE_string, "mode", "train", f"What to do: {', '.join(MODES)}.")
_flag(flags.DEFINE_string, "workdir", None, "Folder of the run; else runs/EXPERIMENT.")
_flag(flags.DEFINE_multi_string, "override", [], "path=value, as model.num_layers=2; repeatable.")
_flag(flags.DEFINE_enum, "on_config_change", "stop", ["stop", "take_new"],
      "What to do when the workdir's run was another.")  # fmt: skip
_flag(flags.DEFINE_string, "target", None, "Hardware: cpu:8, v5e:4x4, v5p:8x8x8, h100:8x8, ...")
_flag(flags.DEFINE_boolean, "multihost", False, "Join the other processes of a cluster's job.")
_flag(flags.DEFINE_string, "coordinator", None, "multihost: host:port of process 0.")
_flag(flags.DEFINE_integer, "num_processes", None, "multihost: how many processes.")
_flag(flags.DEFINE_integer, "process_id", None, "multihost: which process this is, from 0.")
_flag(flags.DEFINE_boolean, "quick", False, "A short version of the mode.")
_flag(flags.DEFINE_string, "prompt", None, "generate: text to continue.")
_flag(flags.DEFINE_integer, "profile_first_step", None, "train: first step of an xprof trace.")
_flag(flags.DEFINE_integer, "profile_steps", None, "train: steps that the trace covers.")
_flag(flags.DEFINE_string, "profile_dir", None, "train: folder of the trace; else WORKDIR/trace.")
_flag(flags.DEFINE_string, "step", None, "compile: train (the default), prefill or decode.")
_flag(flags.DEFINE_boolean, "dump_hlo", False, "compile: write the compiled program.")
_flag(flags.DEFINE_string, "against", None, "compile: workdir of a report to show changes from.")
_flag(flags.DEFINE_boolean, "list", False, "List the experiments.")
_flag(flags.DEFINE_boolean, "help", False, "Show this.")

# Handed to the mode, if it takes an argument of this name.
_OPTIONS = (
    "target", "quick", "prompt", "profile_first_step", "profile_steps", "profile_dir", "step",
    "dump_hlo", "against",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    directory: Path | None = None
    try:
        _parse(argv)
        if FLAGS.help:
            print(f"{__doc__}{FLAGS.module_help('paxlike')}")
        elif FLAGS.list:
            lines = registry.descriptions().items()
            print("\n".join(f"{name:<20} {description}" for name, description in lines), flush=True)
        else:
            experiments = _experiments()
            names = "+".join(experiment.name for experiment in experiments)
            directory = Path(FLAGS.workdir or Path("runs") / names)
            _run(experiments, directory)
        return 0
    except KeyboardInterrupt:
        print("paxlike: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left early, as `| head` does; closing stdout must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _explain(error, directory)


def _parse(argv: Sequence[str]) -> None:
    for name in FLAGS:
        FLAGS[name].unparse()  # of an earlier call in this process
    try:
        rest = FLAGS(argv)[1:]
    except flags.Error as error:
        raise ValueError(one_line(error) + foreign_character(" ".join(argv[1:]))) from error
    if rest:
        hint = foreign_character(rest[0]) or "; flags start with --"
        raise ValueError(f"unexpected argument {rest[0]!r}{hint}")
    # Libraries read absl's own flags, and insist that somebody has parsed them.
    flags.FLAGS(argv[:1])


def _experiments() -> list[Experiment]:
    """The experiments of the flags (one, except where modes compare), overrides applied."""
    if FLAGS.experiment is not None:
        experiments = [registry.build(name) for name in FLAGS.experiment.split(",")]
    elif FLAGS.workdir is not None and (Path(FLAGS.workdir) / workdir.CONFIG).exists():
        experiments = [workdir.load(Path(FLAGS.workdir) / workdir.CONFIG)]
    else:
        raise ValueError(
            "no experiment is named; pass --experiment=NAME (--list shows them), or the --workdir "
            "of an earlier run"
        )
    return [overrides.apply(experiment, FLAGS.override) for experiment in experiments]


def _run(experiments: list[Experiment], directory: Path) -> None:
    mode = load_mode(FLAGS.mode)
    options = _options(mode)
    processes = _processes()
    several = len(experiments) > 1
    if several and FLAGS.mode not in COMPARING:
        raise ValueError(
            f"experiment is {FLAGS.experiment!r}, but --mode={FLAGS.mode} takes one; modes that "
            f"compare several: {', '.join(COMPARING)}"
        )
    for experiment in experiments:
        accepted = workdir.prepare(
            directory / experiment.name if several else directory,
            experiment,
            trains=FLAGS.mode == "train",
            on_change=FLAGS.on_config_change,
        )
        for line in accepted:
            print(f"changed since the last launch: {line}", file=sys.stderr)
    num_devices = max(experiment.parallel.mesh.num_devices for experiment in experiments)
    launch.start(num_devices, target=FLAGS.target, processes=processes)
    if several:
        report = _imported(COMPARING[FLAGS.mode])(experiments, directory, **options)
    else:
        report = mode(experiments[0], directory, **options)
    if launch.is_first_process():
        report.write(directory)
        print(f"report: {directory / 'report.md'}")


def load_mode(name: str) -> Callable[..., Any]:
    """Import the function of a mode.

    Raises:
        ValueError: unknown name; the message lists the modes.
    """
    if name not in MODES:
        raise ValueError(expected_name("mode", name, MODES))
    return _imported(MODES[name])


def _imported(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def _options(mode: Callable[..., Any]) -> dict[str, Any]:
    """Flags that were given and that the mode takes; one that it does not take is an error."""
    given = {name: getattr(FLAGS, name) for name in _OPTIONS if FLAGS[name].present}
    takes = inspect.signature(mode).parameters
    for name in [name for name in given if name not in takes]:
        # Virtual CPU devices can be chosen for every mode.
        if name != "target" or not launch.cpu_target(given.pop(name)):
            raise ValueError(f"--{name} has no effect with --mode={FLAGS.mode}; leave it out")
    return given


def _processes() -> launch.Processes | None:
    names = ("coordinator", "num_processes", "process_id")
    given = {name: getattr(FLAGS, name) for name in names if FLAGS[name].present}
    if given and not FLAGS.multihost:
        raise ValueError(f"--{next(iter(given))} has no effect without --multihost; add it")
    return launch.Processes(**given) if FLAGS.multihost else None


def _explain(error: Exception, directory: Path | None) -> int:
    """Say what went wrong on one line, and return the exit code."""
    if is_users_mistake(error):
        print(f"paxlike: {one_line(error)}", file=sys.stderr)
        return 2
    where = "above"
    if directory is not None and directory.is_dir():
        where = str(directory / "error.txt")
        (directory / "error.txt").write_text("".join(traceback.format_exception(error)))
    else:
        traceback.print_exception(error)
    line = f"{type(error).__name__}: {one_line(error)}"[:500]
    print(f"paxlike: internal error: {line} (traceback: {where})", file=sys.stderr)
    return 1


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv))


if __name__ == "__main__":
    run()
