"""Safetensors files, read and written a tensor at a time.

A file is the length of a header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
offsets) and the tensors' bytes. We read and write it ourselves, because peak memory is the point:
mapped pages count as resident, and the library's writer takes all tensors of a file at once. Every
header is checked against its file before a tensor is read. Pickled weights are never opened.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paxlike.interop.mapping import Index, Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100 * 2**20


@dataclasses.dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: np.dtype
    shape: Shape
    offset: int


class SafeTensors:
    """The tensors of a folder: one file, or several with an index.

    Attributes:
        shapes: name -> shape.
    """

    def __init__(self, folder: Path) -> None:
        """Read every header.

        Raises:
            ValueError: no safetensors, a missing or damaged file, or an index that is wrong.
        """
        self._stored = _headers(folder)
        self.shapes: dict[str, Shape] = {name: t.shape for name, t in self._stored.items()}

    def where(self, name: str) -> str:
        """The file of a tensor."""
        return str(self._stored[name].file)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read a slice of a tensor; only its rows are read from disk."""
        stored = self._stored[name]
        if not stored.shape:
            return np.fromfile(stored.file, stored.dtype, 1, offset=stored.offset).reshape(())
        start, stop, _ = index[0].indices(stored.shape[0])
        row = math.prod(stored.shape[1:])
        offset = stored.offset + start * row * stored.dtype.itemsize
        flat = np.fromfile(stored.file, stored.dtype, (stop - start) * row, offset=offset)
        return flat.reshape(stop - start, *stored.shape[1:])[(slice(None), *index[1:])]


@dataclasses.dataclass(frozen=True)
class ToWrite:
    """A tensor that is about to be written."""

    name: str
    shape: Shape
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    folder: Path,
    plan: Iterable[ToWrite],
    arrays: Iterator[np.ndarray] | None,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write tensors to one file, or to several and an index, as `transformers` names them.

    Args:
        folder: where.
        plan: what comes, in order.
        arrays: the tensors, one after another, each taken when the one before is written. None
            writes nothing: a process that only helps to make them.
        shard_bytes: size at which a new file begins.
    """
    shards: list[list[ToWrite]] = [[]]
    for tensor in plan:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if arrays is None:
        return
    count = len(shards)
    names = [SINGLE] if count == 1 else [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, arrays)
    if count > 1:
        weights = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(t.num_bytes for shard in shards for t in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, shard: list[ToWrite], arrays: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            array = next(arrays)
            assert array.shape == tensor.shape and array.dtype == tensor.dtype, tensor
            stream.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
        stream.flush()
        os.fsync(stream.fileno())


def _headers(folder: Path) -> dict[str, _Stored]:
    files, weight_map = _files(folder)
    stored: dict[str, _Stored] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in stored:
                raise ValueError(f"tensor {name!r} is both in {stored[name].file} and in {file}")
            stored[name] = tensor
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise ValueError(
                f"{folder / INDEX} says that tensor {name!r} is in {file}, but it is not there; "
                "the download is incomplete or mixed"
            )
    return stored


def _files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    if (folder / INDEX).exists():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX} is not an index of safetensors: {error}") from error
        if missing := [str(file) for file in files if not file.exists()]:
            raise ValueError(
                f"{', '.join(missing)} is missing, which {folder / INDEX} lists; the download is "
                "incomplete"
            )
        return files, weight_map
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({pickled[0]}), which can run any code when they are "
            "read, and are not; convert them where you trust them: python -c 'from transformers "
            f'import AutoModelForCausalLM as M; M.from_pretrained("{folder}").save_pretrained('
            f'"{folder}-safetensors")\''
        )
    raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}; expected a Hugging Face model")


def _header(file: Path) -> dict[str, _Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(
                f"{file} is no safetensors file or is cut off: {size} bytes, of which a header "
                f"claims {length}"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (t["dtype"], tuple(map(int, t["shape"])), *map(int, t["data_offsets"]))
                for name, t in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has a damaged header: {error}") from error
    stored = {}
    for name, (kind, shape, start, end) in entries.items():
        if kind not in _DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} has dtype {kind}; expected one of {', '.join(_DTYPES)}"
            )
        if min(shape, default=1) < 0 or end - start != math.prod(shape) * _DTYPES[kind].itemsize:
            raise ValueError(
                f"{file}: tensor {name!r} of shape {shape} and dtype {kind} has {end - start} bytes"
            )
        if start < 0 or 8 + length + end > size:
            raise ValueError(
                f"{file} is cut off within tensor {name!r}: it has {size} bytes, and the tensor "
                f"ends at {8 + length + end}"
            )
        stored[name] = _Stored(file, _DTYPES[kind], shape, 8 + length + start)
    return stored
