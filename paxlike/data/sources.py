"""Documents out of files, datasets and generators, numbered so that reading can start anywhere.

Every source yields records in one fixed order. A record is a document or says why it is none (not
UTF-8, too long, not JSON), so damaged records are counted, not fatal, and keep their number. A file
that is damaged as a whole is an error that names it. A text file or line beyond
`max_document_bytes` is passed over without being held in memory.
"""

import glob
import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from paxlike.data.config import SourceConfig
from paxlike.data.optional import optional_package
from paxlike.data.stdlib_corpus import stdlib_files

_BLOCK = 2**20  # bytes passed over at a time
_CHUNK = 64  # ArrayRecord records read at a time


class Record(NamedTuple):
    """A document, or the reason why there is none.

    Attributes:
        name: where it stands, for messages.
        text: the document; empty where there is a problem.
        problem: why it is skipped; empty for a document.
    """

    name: str
    text: str = ""
    problem: str = ""


class Source(Protocol):
    """A numbered sequence of records."""

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yields the records from number `start` on; the same ones on every call."""
        ...

    def identity(self) -> str:
        """Hash of what the records are made from."""
        ...


def open_source(config: SourceConfig) -> Source:
    """Opens a source.

    Raises:
        ValueError: a pattern matches no file, or a match is not a regular file.
    """
    match config.kind:
        case "stdlib":
            return TextFiles(config, stdlib_files())
        case "text":
            return TextFiles(config, _expand(config.paths))
        case "jsonl":
            return JsonLines(config, _expand(config.paths))
        case "parquet":
            return Parquet(config, _expand(config.paths))
        case "arrayrecord":
            return ArrayRecords(config, _expand(config.paths))
        case "huggingface":
            return HuggingFace(config)
        case "synthetic":
            return Synthetic(config)


class _Files:
    """What the sources that read files share."""

    def __init__(self, config: SourceConfig, files: list[str]) -> None:
        self._config = config
        self._files = files

    def identity(self) -> str:
        """Hash of the files' bytes in order; of names and sizes where they are streamed."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._files:
            size = os.path.getsize(path)
            digest.update(size.to_bytes(8, "little"))
            if self._config.streaming:
                digest.update(os.path.basename(path).encode(errors="surrogateescape") + b"\0")
                continue
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        return digest.hexdigest()


class TextFiles(_Files):
    """Each file a document, or each part between separators."""

    def records(self, start: int = 0) -> Iterator[Record]:
        if self._config.separator is None:
            for path in self._files[start:]:
                yield self._file(path)
            return
        number = 0
        for path in self._files:
            for begin, end, content in self._parts(path):
                if number >= start:
                    yield _document(f"{path} byte {begin}", content[begin:end], self._config)
                number += 1

    def _file(self, path: str) -> Record:
        if os.path.getsize(path) > self._config.max_document_bytes:
            return _too_long(path, self._config)
        with open(path, "rb") as file:
            return _document(path, file.read(), self._config)

    def _parts(self, path: str) -> Iterator[tuple[int, int, Any]]:
        assert self._config.separator is not None
        separator = self._config.separator.encode()
        with open(path, "rb") as file:
            if not os.path.getsize(path):
                yield 0, 0, b""
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                begin = 0
                while (end := content.find(separator, begin)) >= 0:
                    yield begin, end, content
                    begin = end + len(separator)
                if content[begin:].strip():
                    yield begin, len(content), content


class JsonLines(_Files):
    """Each line a JSON object with the text in one field."""

    def records(self, start: int = 0) -> Iterator[Record]:
        number = 0
        for path in self._files:
            for line_number, line in enumerate(self._lines(path), 1):
                if number >= start:
                    yield self._record(f"{path} line {line_number}", line)
                number += 1

    def _lines(self, path: str) -> Iterator[bytes | None]:
        """Lines of a file; None for one beyond the limit."""
        limit = self._config.max_document_bytes
        with open(path, "rb") as file:
            if not os.path.getsize(path):
                yield b""
            while line := file.readline(limit + 1):
                if len(line) <= limit or line.endswith(b"\n"):
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(_BLOCK)
                yield None

    def _record(self, name: str, line: bytes | None) -> Record:
        if line is None:
            return _too_long(name, self._config)
        if not line.strip():
            return Record(name, problem="empty")
        return _json_field(name, line, self._config.text_field or "text", self._config)


class Parquet(_Files):
    """Each row a document, the text in one column."""

    def records(self, start: int = 0) -> Iterator[Record]:
        pyarrow = optional_package("pyarrow", needed_by="data.source.kind 'parquet'")
        from pyarrow.parquet import ParquetFile

        first = 0
        for path in self._files:
            try:
                with ParquetFile(path) as file:
                    yield from self._rows(path, file, start - first)
                    first += file.metadata.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                raise _damaged(path, "Parquet", error) from error

    def _rows(self, path: str, file: Any, start: int) -> Iterator[Record]:
        """Rows of a file from `start` on; groups of rows before it are not read."""
        field = self._config.text_field or "text"
        columns = file.schema_arrow.names
        if field not in columns:
            raise ValueError(
                f"data.source.text_field is {field!r}, and {path} has the columns {columns}"
            )
        row = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if row + size <= start:
                row += size
                continue
            for batch in file.iter_batches(256, row_groups=[group], columns=[field]):
                for content in _as_bytes(batch.column(0), f"{path} column {field!r}"):
                    if row >= start:
                        yield _document(f"{path} row {row}", content, self._config)
                    row += 1


class ArrayRecords(_Files):
    """Each record a document: UTF-8 text, or JSON where `text_field` is given."""

    def records(self, start: int = 0) -> Iterator[Record]:
        from array_record.python.array_record_module import ArrayRecordReader

        first = 0
        for path in self._files:
            reader = ArrayRecordReader(path)
            try:
                total = reader.num_records()
                for begin in range(max(0, start - first), total, _CHUNK):
                    contents = reader.read(begin, min(begin + _CHUNK, total))
                    for number, content in enumerate(contents, begin):
                        yield self._record(f"{path} record {number}", content)
                reader.close()  # Raises what opening met: a damaged file has 0 records until here.
            except RuntimeError as error:
                raise _damaged(path, "ArrayRecord", error) from error
            first += total

    def _record(self, name: str, content: bytes) -> Record:
        if self._config.text_field is None:
            return _document(name, content, self._config)
        return _json_field(name, content, self._config.text_field, self._config)


class HuggingFace:
    """Each row of a Hugging Face dataset a document, from the hub, a folder, or a stream."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._dataset = _load_dataset(config)
        field = config.text_field or "text"
        # A stream may not know its columns before it is read.
        if self._dataset.column_names is not None and field not in self._dataset.column_names:
            raise ValueError(
                f"data.source.text_field is {field!r}, and dataset {config.name} has the columns "
                f"{self._dataset.column_names}"
            )
        self._field = field

    def records(self, start: int = 0) -> Iterator[Record]:
        number = start
        try:
            for row in self._dataset.skip(start):
                name = f"{self._config.name} row {number}"
                yield _document(name, row.get(self._field), self._config)
                number += 1
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"data.source: dataset {self._config.name!r} cannot be read at row {number}: "
                f"{error}"
            ) from error

    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        if self._config.streaming:
            config = self._config
            digest.update(f"{config.name} {config.subset} {config.dataset_split}".encode())
        else:
            for record in self.records():
                digest.update(record.text.encode() + b"\0")
        return digest.hexdigest()


class Synthetic:
    """Documents of a random language, as decimal token ids: learnable at two levels.

    The first half of a document walks a random first-order Markov chain (each id has four
    successors), which a bigram model can learn; the second half repeats the first, which needs
    attention.
    """

    _HALF = 64
    _SUCCESSORS = 4

    def __init__(self, config: SourceConfig) -> None:
        self._config = config

    def records(self, start: int = 0) -> Iterator[Record]:
        config = self._config
        generator = np.random.default_rng(config.generator_seed)
        successors = generator.integers(
            config.vocab_size, size=(config.vocab_size, self._SUCCESSORS)
        )
        half = np.empty((config.num_documents, self._HALF), np.int64)
        half[:, 0] = generator.integers(config.vocab_size, size=config.num_documents)
        for position in range(1, self._HALF):
            choice = generator.integers(self._SUCCESSORS, size=config.num_documents)
            half[:, position] = successors[half[:, position - 1], choice]
        for number in range(start, config.num_documents):
            text = " ".join(map(str, half[number].tolist()))
            yield Record(f"synthetic document {number}", f"{text} {text}")

    def identity(self) -> str:
        config = self._config
        return f"synthetic-{config.generator_seed}-{config.vocab_size}-{config.num_documents}"


def _expand(patterns: tuple[str, ...]) -> list[str]:
    """Files that the patterns match, sorted, each once."""
    files = set()
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            raise ValueError(f"data.source.paths: nothing matches {pattern!r}")
        for path in matches:
            if os.path.isfile(path):
                files.add(path)
            elif path == pattern or not os.path.isdir(path):
                # A pipe or device could block for ever.
                raise ValueError(
                    f"data.source.paths: {path} is not a regular file; for a folder give a pattern "
                    "such as 'folder/**/*.txt'"
                )
    if not files:
        raise ValueError(f"data.source.paths: {patterns} match folders only; expected files")
    return sorted(files)


def _load_dataset(config: SourceConfig) -> Any:
    from paxlike.data.corpus import cache_folder

    datasets = optional_package("datasets", needed_by="data.source.kind 'huggingface'")
    assert config.name is not None
    name = os.path.expanduser(config.name)
    try:
        if os.path.isfile(os.path.join(name, "state.json")):
            dataset: Any = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(
                name,
                config.subset,
                split=config.dataset_split,
                streaming=config.streaming,
                cache_dir=os.path.join(cache_folder(), "huggingface"),
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.source: cannot load dataset {name!r}, subset {config.subset!r}, split "
            f"{config.dataset_split!r}: {error}"
        ) from error
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise ValueError(
            f"data.source.name is {name!r}, saved with the splits {list(dataset)}; give the "
            "folder of one of them"
        )
    return dataset.to_iterable_dataset() if isinstance(dataset, datasets.Dataset) else dataset


def _document(name: str, content: Any, config: SourceConfig) -> Record:
    """A record of UTF-8 bytes, or of text."""
    try:
        if isinstance(content, str):
            size = len(content.encode())  # Fails on lone surrogates, which JSON can spell.
            text = content
        elif isinstance(content, bytes):
            size, text = len(content), content.decode()
        else:
            return Record(name, problem="no text")
    except UnicodeError:
        return Record(name, problem="not UTF-8")
    if size > config.max_document_bytes:
        return _too_long(name, config)
    return Record(name, text) if text.strip() else Record(name, problem="empty")


def _json_field(name: str, content: bytes, field: str, config: SourceConfig) -> Record:
    try:
        value = json.loads(content)
    except UnicodeDecodeError:
        return Record(name, problem="not UTF-8")
    except (ValueError, RecursionError):
        return Record(name, problem="not JSON")
    if not isinstance(value, dict) or field not in value:
        return Record(name, problem=f"no field {field!r}")
    return _document(name, value[field], config)


def _too_long(name: str, config: SourceConfig) -> Record:
    return Record(name, problem=f"longer than max_document_bytes={config.max_document_bytes}")


def _as_bytes(column: Any, name: str) -> list[bytes | None]:
    """A column's values without decoding, so that one bad value stays one bad value."""
    import pyarrow

    try:
        return column.cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowNotImplementedError as error:
        raise ValueError(
            f"data.source.text_field: {name} is {column.type}; expected text"
        ) from error


def _damaged(path: str, form: str, error: Exception) -> ValueError:
    return ValueError(
        f"data.source.paths: {path} is not a whole {form} file ({str(error) or 'cut short'}); "
        "fetch or write it again, or leave it out"
    )
