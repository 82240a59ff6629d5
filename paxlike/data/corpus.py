"""A finite source as one array of tokens a split, tokenized once and mapped from disk afterwards.

The cache is keyed by the content of the corpus, by how it is read and by the tokenizer; it is
written beside its place and renamed into it, so that a reader never meets half of one, and hosts
that share a disk may write at the same time.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from paxlike.data.config import DataConfig, SourceConfig
from paxlike.data.sources import Record, Source, open_source
from paxlike.data.tokenizers import (
    ByteTokenizer,
    IntegerTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

_FORMAT = 1
SPLITS = ("train", "eval")


def cache_folder() -> str:
    """Where corpora and trained tokenizers are kept: `PAXLIKE_CACHE` or ~/.cache/paxlike."""
    return os.environ.get("PAXLIKE_CACHE") or os.path.expanduser("~/.cache/paxlike")


class Skips:
    """Counts records that are no documents, by reason, with the name of each reason's first."""

    def __init__(self) -> None:
        self.reasons: dict[str, dict[str, Any]] = {}

    def documents(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the documents among the records."""
        for record in records:
            if record.problem:
                reason = self.reasons.setdefault(record.problem, {"count": 0, "first": record.name})
                reason["count"] += 1
            else:
                yield record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens of one split of one source.

    Attributes:
        tokens: [total] uint16 or uint32; a document is begin, its text, end, where the tokenizer
            has such tokens.
        offsets: [documents + 1] int64, where each document begins, and the total.
        num_bytes: UTF-8 bytes of the documents.
        content_hash: hash of the source's content.
        skipped: records that were no documents: reason -> count and first name.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    num_bytes: int
    content_hash: str
    skipped: dict[str, dict[str, Any]]


def split_of(text: str, eval_fraction: float) -> str:
    """The split that a document belongs to, by its content alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "little") < eval_fraction * 2**64 else "train"


def document_tokens(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Begin, text and end of a document as int32."""
    ids = tokenizer.encode(text)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.concatenate([begin, ids, end]).astype(np.int32)


def make_tokenizer(config: DataConfig) -> Tokenizer:
    """Makes the tokenizer that the configuration asks for; training it where it must be trained.

    Raises:
        ValueError: the file is missing or damaged, or there is no document to train on.
    """
    if config.sources[0].kind == "synthetic":
        return IntegerTokenizer(config.sources[0].vocab_size)
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if not config.tokenizer.startswith("bpe:"):
        return load_tokenizer(os.path.expanduser(config.tokenizer))
    sources = [open_source(source) for source in config.sources]
    keys = [
        reading_key(source, reader.identity())
        for source, reader in zip(config.sources, sources, strict=True)
    ]
    key = [config.tokenizer, config.eval_fraction, keys]
    folder = os.path.join(cache_folder(), "tokenizers")
    path = os.path.join(folder, _hash(key) + ".json")
    if not os.path.exists(path):
        texts = (
            record.text
            for source in sources
            for record in Skips().documents(source.records())
            if split_of(record.text, config.eval_fraction) == "train"
        )
        trained = train_bpe(texts, int(config.tokenizer.removeprefix("bpe:")))
        with _writing(folder) as draft:
            trained.save(os.path.join(draft, "tokenizer.json"))
            os.replace(os.path.join(draft, "tokenizer.json"), path)
    return load_tokenizer(path)


def load_corpus(
    config: SourceConfig, tokenizer: Tokenizer, *, split: str, eval_fraction: float
) -> Corpus:
    """Maps the tokens of a split from the cache, tokenizing the source first if they are not there.

    Args:
        config: a source that is not streamed.
        tokenizer: of the documents.
        split: `train` or `eval`.
        eval_fraction: share of documents in `eval`.

    Raises:
        ValueError: a file is damaged, the split holds no document, or the cache cannot be written.
    """
    source = open_source(config)
    identity = source.identity()
    key = reading_key(config, identity)
    place = os.path.join(
        cache_folder(), "corpora", _hash([_FORMAT, key, eval_fraction, tokenizer.fingerprint])
    )
    existed = os.path.exists(place)
    try:
        corpus = _read(place, split)
    except (OSError, ValueError, KeyError, EOFError):
        if existed:  # Damaged by a full disk or a crash. If not, another host may just have come.
            shutil.rmtree(place, ignore_errors=True)
        with _writing(os.path.dirname(place)) as draft:
            _write(draft, source, tokenizer, eval_fraction, identity)
            # Another host may have been first: its content is the same.
            with contextlib.suppress(OSError):
                os.rename(draft, place)
        corpus = _read(place, split)
    if len(corpus.offsets) < 2:
        raise ValueError(_no_documents(config, split, eval_fraction, corpus.skipped))
    return corpus


def _no_documents(
    config: SourceConfig, split: str, eval_fraction: float, skipped: dict[str, dict[str, Any]]
) -> str:
    reasons = "; ".join(
        f"{reason}: {entry['count']}, first {entry['first']}" for reason, entry in skipped.items()
    )
    return (
        f"data.source ({config.kind}) has no document in the {split} split "
        f"(data.eval_fraction={eval_fraction}; skipped records: {reasons or 'none'}); "
        "give more documents, or another eval_fraction"
    )


def reading_key(config: SourceConfig, identity: str) -> list[Any]:
    """What decides the documents of a source: the content, and how it is read."""
    return [config.kind, config.text_field, config.separator, config.max_document_bytes, identity]


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _writing(folder: str) -> Iterator[str]:
    """A draft folder beside what it will become; gone afterwards."""
    try:
        os.makedirs(folder, exist_ok=True)
        draft = tempfile.mkdtemp(prefix=".draft-", dir=folder)
    except OSError as error:
        raise ValueError(
            f"cannot write the data cache in {folder} ({error}); set PAXLIKE_CACHE to a folder "
            "that can be written"
        ) from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(
    folder: str, source: Source, tokenizer: Tokenizer, eval_fraction: float, identity: str
) -> None:
    """Tokenizes a source into `<split>.tokens`, `<split>.offsets.npy` and `meta.json`."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    skips = Skips()
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    num_bytes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {
            split: stack.enter_context(open(os.path.join(folder, f"{split}.tokens"), "wb"))
            for split in SPLITS
        }
        for record in skips.documents(source.records()):
            split = split_of(record.text, eval_fraction)
            tokens = document_tokens(tokenizer, record.text)
            if len(tokens):
                files[split].write(tokens.astype(dtype).tobytes())
                lengths[split].append(len(tokens))
                num_bytes[split] += len(record.text.encode())
    for split in SPLITS:
        offsets = np.concatenate([[0], np.cumsum(lengths[split], dtype=np.int64)]).astype(np.int64)
        np.save(os.path.join(folder, f"{split}.offsets.npy"), offsets)
    meta = {
        "dtype": np.dtype(dtype).name,
        "num_bytes": {split: num_bytes[split] for split in SPLITS},
        "content_hash": identity,
        "skipped": skips.reasons,
    }
    with open(os.path.join(folder, "meta.json"), "w") as file:
        json.dump(meta, file)


def _read(folder: str, split: str) -> Corpus:
    with open(os.path.join(folder, "meta.json")) as file:
        meta = json.load(file)
    offsets = np.load(os.path.join(folder, f"{split}.offsets.npy"))
    total = int(offsets[-1])
    dtype = np.dtype(meta["dtype"])
    path = os.path.join(folder, f"{split}.tokens")
    if os.path.getsize(path) != total * dtype.itemsize:
        raise ValueError(f"{path} is cut short")
    return Corpus(
        tokens=np.asarray(np.memmap(path, dtype, "r")) if total else np.empty(0, dtype),
        offsets=offsets,
        num_bytes=meta["num_bytes"][split],
        content_hash=meta["content_hash"],
        skipped=meta["skipped"],
    )
