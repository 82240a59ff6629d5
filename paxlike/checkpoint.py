"""Checkpoints: written in the background, sealed when durable, restored onto any mesh.

A checkpoint is a folder `<step>` that orbax writes beside its place and renames; then process 0
adds `seal.json` with the array shapes and dtypes, what the caller wants back (data position, ...),
and a fingerprint of every file. Only a sealed checkpoint whose files match counts, so whatever is
left by a kill is recognised without reading an array, and the one before it is used.

Every process writes the shards that it holds, to a file system that all of them see; only process 0
writes JSON. Host memory holds one checkpoint while it is written, and none afterwards. Layouts are
not stored: the caller's abstract arrays say where each array goes.
"""

import concurrent.futures
import dataclasses
import errno
import json
import math
import os
import pathlib
import shutil
import sys
import zlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

_SEAL = "seal.json"
_FORMAT = 1
_ENDS = 2**20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave back.

    Attributes:
        step: its step.
        tree: the arrays, in the layout asked for.
        extra: the caller's JSON value.
    """

    step: int
    tree: Any
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run in one folder.

    Use as a context manager: leaving it waits for the save in progress.

    Args:
        directory: where; made when the first checkpoint is saved.
        keep: newest checkpoints to keep.
        keep_best: checkpoints with the lowest scores to keep as well.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 2, keep_best: int = 0
    ) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self._keep, self._keep_best = keep, keep_best
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.wait()
        finally:
            self._worker.shutdown()

    def steps(self) -> list[int]:
        """Steps of the sealed checkpoints, oldest first; damaged ones are not told apart yet."""
        return sorted(int(p.parent.name) for p in self.directory.glob(f"[0-9]*/{_SEAL}"))

    def ranked(self) -> list[int]:
        """Steps of the sealed checkpoints that have a finite score, lowest score first."""
        scores = {step: _score(self._path(step)) for step in self.steps()}
        scored = [(x, step) for step, x in scores.items() if x is not None and math.isfinite(x)]
        return [step for _, step in sorted(scored)]

    def save(
        self, step: int, tree: Any, extra: dict[str, Any], *, score: float | None = None
    ) -> None:
        """Copy the arrays to the host and write them in the background.

        The arrays may be donated as soon as this returns. Called on every process.

        Args:
            step: what the checkpoint is called.
            tree: pytree of arrays.
            extra: a JSON value to keep beside them.
            score: lower is better, such as the evaluation loss; None is not ranked.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        path = self._path(step)
        if jax.process_index() == 0:
            self._remove_leftovers(path)
        arrays = flatten(tree)
        seal = {
            "format": _FORMAT,
            "step": step,
            "arrays": {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()},
            "extra": extra,
            "score": score,
        }
        try:
            with _orbax():
                response = ocp.save_async(str(path), arrays)
        except Exception as error:
            raise CheckpointError(_failure(path, error)) from error
        self._pending = self._worker.submit(self._finish, response, path, seal)

    def check(self) -> None:
        """Raise if the save in the background has failed; never waits.

        Raises:
            CheckpointError: it has; the message says where and why.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore(self, abstract: Any, *, step: int | None = None) -> Restored | None:
        """Read the newest good checkpoint, or that of one step.

        A damaged checkpoint is named on stderr, and the one before it is read.

        Args:
            abstract: pytree of `jax.ShapeDtypeStruct` with shardings: what is expected, and where.
            step: which; None is the newest good one.

        Returns:
            None if there is none.

        Raises:
            ValueError: its arrays are not the expected ones; or the step asked for is damaged or
                not there.
        """
        for candidate in [step] if step is not None else reversed(self.steps()):
            restored = _read(self._path(candidate), abstract)
            if isinstance(restored, Restored):
                return restored
            if step is not None:
                raise ValueError(f"checkpoint {self._path(step)} is unusable: {restored}")
            print(
                f"warning: skipping damaged checkpoint {self._path(candidate)} ({restored})",
                file=sys.stderr,
            )
        return None

    def _path(self, step: int) -> pathlib.Path:
        return self.directory / f"{step:08d}"

    def _remove_leftovers(self, path: pathlib.Path) -> None:
        """Remove what killed saves left: unfinished folders, and the one to be written."""
        for old in [path, *self.directory.glob("*.orbax-checkpoint-tmp*")]:
            shutil.rmtree(old, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)

    def _finish(self, response: Any, path: pathlib.Path, seal: dict[str, Any]) -> None:
        try:
            response.result()
            if jax.process_index() == 0:
                _write_json(path / _SEAL, seal | {"files": _fingerprints(path)})
        except Exception as error:
            raise CheckpointError(_failure(path, error)) from error
        if jax.process_index() == 0:
            kept = {*self.steps()[-self._keep :]}
            if self._keep_best:
                kept |= {*self.ranked()[: self._keep_best]}
            for step in set(self.steps()) - kept:
                # The seal goes first: what is half removed never counts.
                (self._path(step) / _SEAL).unlink(missing_ok=True)
                shutil.rmtree(self._path(step), ignore_errors=True)


def load_params(
    directory: str | os.PathLike[str],
    abstract: Any,
    *,
    prefix: str = "params",
    cast: bool = False,
    which: str = "newest",
) -> tuple[int, Any]:
    """Read only the parameters (or another part) of the newest or best good checkpoint.

    Args:
        directory: the `checkpoints` folder of a run.
        abstract: the expected parameters with shardings.
        prefix: the part of the saved tree; `ema` is the moving average.
        cast: convert to the dtypes of `abstract` instead of insisting on the saved ones.
        which: `newest`, `best` (the lowest score), or a step.

    Returns:
        The checkpoint's step, and the parameters.

    Raises:
        ValueError: no usable checkpoint, or other parameters than expected.
    """
    with Checkpoints(directory) as checkpoints:
        steps = checkpoints.steps()
        if which == "best":
            candidates = checkpoints.ranked()
        else:
            candidates = [n for n in reversed(steps) if which in ("newest", str(n))]
        for step in candidates:
            read = _read(checkpoints._path(step), {prefix: abstract}, part=prefix, cast=cast)
            if isinstance(read, Restored):
                return read.step, read.tree[prefix]
            print(f"warning: skipping damaged checkpoint {step} ({read})", file=sys.stderr)
    if steps and not candidates:
        raise ValueError(
            f"no checkpoint {which!r} in {directory}; there are steps {steps}, of which "
            f"{checkpoints.ranked() or 'none'} have an evaluation loss"
        )
    raise ValueError(f"no usable checkpoint in {directory}; train first, or name another workdir")


def flatten(tree: Any) -> dict[str, Any]:
    """Name each leaf of a pytree by its path, as in `params/layers/mlp/up`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _orbax() -> ocp.Context:
    context = ocp.Context()
    # The sharding file names devices, which another machine does not have.
    context.array.saving.enable_write_sharding_file = False
    return context


def _read(
    path: pathlib.Path, abstract: Any, *, part: str | None = None, cast: bool = False
) -> Restored | str:
    """Read one checkpoint; the answer is a string if it is damaged.

    Raises:
        ValueError: its arrays are not the expected ones.
    """
    seal = _read_seal(path)
    if isinstance(seal, str):
        return seal
    saved = seal["arrays"]
    if part is not None:
        saved = {k: v for k, v in saved.items() if k == part or k.startswith(part + "/")}
    wanted = flatten(abstract)
    _check_arrays(path, saved, wanted, cast=cast)
    targets = {name: wanted.get(name, ocp.PLACEHOLDER) for name in seal["arrays"]}
    try:
        with _orbax():
            arrays = ocp.load(str(path), targets)
    except Exception as error:
        return f"its arrays cannot be read: {_first_line(error)}"
    tree = jax.tree_util.tree_map_with_path(lambda p, _: arrays[_name(p)], abstract)
    return Restored(step=seal["step"], tree=tree, extra=seal["extra"])


def _score(path: pathlib.Path) -> float | None:
    try:
        return json.loads((path / _SEAL).read_text()).get("score")
    except (OSError, ValueError):
        return None


def _read_seal(path: pathlib.Path) -> dict[str, Any] | str:
    try:
        seal = json.loads((path / _SEAL).read_text())
    except FileNotFoundError:
        return f"it has no {_SEAL}: it was not completed"
    except (OSError, ValueError) as error:
        return f"its {_SEAL} cannot be read: {_first_line(error)}"
    if seal.get("format") != _FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {seal.get('format')!r}; expected {_FORMAT}: it was "
            "written by another version"
        )
    found = _fingerprints(path)
    for name, expected in seal["files"].items():
        if found.get(name) != expected:
            return f"its file {name} is {'damaged' if name in found else 'missing'}"
    return seal


def _check_arrays(
    path: pathlib.Path, saved: dict[str, Any], wanted: dict[str, Any], *, cast: bool
) -> None:
    """Compare what is saved with what is expected, because orbax converts dtypes silently."""
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is not expected" for name in saved if name not in wanted]
    for name, x in wanted.items():
        shape, dtype = saved.get(name, (list(x.shape), str(x.dtype)))
        if tuple(shape) != x.shape:
            problems.append(f"{name} has shape {tuple(shape)}, expected {x.shape}")
        elif dtype != str(x.dtype) and not cast:
            problems.append(f"{name} is {dtype}, expected {x.dtype}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"checkpoint {path} does not fit: {'; '.join(problems[:4])}{more}. Restore it with "
            "the model and optimizer that it was saved with, or use another workdir"
        )


def _fingerprints(path: pathlib.Path) -> dict[str, list[int]]:
    """File -> [bytes, crc32 of its first and last MiB]; its cost does not grow with the arrays."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != _SEAL:
            with file.open("rb") as stream:
                size = file.stat().st_size
                crc = zlib.crc32(stream.read(_ENDS))
                stream.seek(max(size - _ENDS, 0))
                found[str(file.relative_to(path))] = [size, zlib.crc32(stream.read(), crc)]
    return found


def _write_json(path: pathlib.Path, value: Any) -> None:
    """Write durably and atomically: the file is whole or not there."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def is_full_disk(error: BaseException) -> bool:
    """Whether a failed save found no room, which leaves older checkpoints intact."""
    text = os.strerror(errno.ENOSPC)
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or text in str(cause):
            return True
        cause = cause.__cause__
    return False


def _failure(path: pathlib.Path, error: BaseException) -> str:
    return f"checkpoint {path} could not be written: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
