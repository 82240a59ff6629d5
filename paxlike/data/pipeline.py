"""The batches of one host, and the position to resume from.

Rows are numbered over the whole run, independent of the number of hosts; batch s holds rows s*B to
(s+1)*B, of which a host makes a contiguous block. The position is the number of the next row (and,
for streams, four integers a source), so it is the same on every host and can be taken up by any
number of them, and by another batch size. Nothing is exchanged between hosts.

Dims: B rows of the global batch, T tokens of a row.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

import numpy as np

from paxlike.data.config import DataConfig, SourceConfig
from paxlike.data.corpus import SPLITS, Corpus, load_corpus, make_tokenizer, reading_key
from paxlike.data.packing import Batch
from paxlike.data.rows import CorpusRows, Rows, StreamRows
from paxlike.data.sources import open_source
from paxlike.data.tokenizers import Tokenizer

_FORMAT = 1
_ENDLESS = 2**48


def build(
    config: DataConfig,
    *,
    global_batch_size: int,
    split: Literal["train", "eval"],
    seed: int,
    num_hosts: int = 1,
    host_index: int = 0,
) -> "Pipeline":
    """Builds the batches that one host reads.

    Args:
        config: what is read.
        global_batch_size: B, rows of all hosts together.
        split: `train` or `eval`.
        seed: of the order; the same on all hosts.
        num_hosts: hosts that share the batch in contiguous blocks; divides B.
        host_index: which of them this is.

    Raises:
        ValueError: an argument is out of range, a file is missing or damaged, the split is empty.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {SPLITS}")
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected at least 0")
    if not 0 <= host_index < num_hosts:
        raise ValueError(
            f"host_index is {host_index} of num_hosts {num_hosts}; expected 0 <= host_index < "
            "num_hosts"
        )
    if global_batch_size < 1 or global_batch_size % num_hosts:
        raise ValueError(
            f"global_batch_size is {global_batch_size} on {num_hosts} hosts; expected a multiple "
            f"of {num_hosts}"
        )
    tokenizer = make_tokenizer(config)
    parts: list[Rows] = []
    facts: list[dict[str, Any]] = []
    for number, source in enumerate(config.sources):
        rows, known = _open(source, config, tokenizer, split, (seed, number))
        parts.append(rows)
        facts.append(known)
    mine = np.arange(global_batch_size) * num_hosts // global_batch_size == host_index
    return Pipeline(config, tokenizer, parts, facts, split=split, seed=seed, mine=mine)


def _open(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    split: str,
    seed: tuple[int, int],
) -> tuple[Rows, dict[str, Any]]:
    """Rows of one source, and what is known of it."""
    facts = {"kind": source.kind, "weight": source.weight}
    if source.streaming:
        reader = open_source(source)
        stream = StreamRows(reader, config, tokenizer, split=split, seed=seed)
        return stream, facts | {"content_hash": reader.identity(), "skipped": stream.skipped}
    corpus: Corpus = load_corpus(source, tokenizer, split=split, eval_fraction=config.eval_fraction)
    rows = CorpusRows(corpus, config, seed=seed, pad_id=tokenizer.pad_id)
    return rows, facts | {
        "content_hash": corpus.content_hash,
        "documents": len(corpus.offsets) - 1,
        "tokens": len(corpus.tokens),
        "bytes": corpus.num_bytes,
        "rows": rows.num_rows,
        "skipped": corpus.skipped,
    }


class Pipeline:
    """An endless iterator over this host's batches; `build` makes it.

    A batch is a dict of arrays [B / num_hosts, T]; `packing.cut` says what they hold.

    Attributes:
        tokenizer: of the documents.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        parts: list[Rows],
        facts: list[dict[str, Any]],
        *,
        split: str,
        seed: int,
        mine: np.ndarray,
    ) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._parts = parts
        self._facts = facts
        self._split = split
        self._seed = seed
        self._mine = mine
        self._row = 0
        self._mix = _mix([source.weight for source in config.sources])

    @property
    def info(self) -> dict[str, Any]:
        """What is read, for reports.

        `documents`, `tokens`, `bytes` (UTF-8) and `rows` of an epoch of this split, None where a
        source is streamed; `skipped`: reason -> count and the first record's name, over both
        splits; `content_hash`; `tokenizer`, `vocab_size`; the same facts for each of the `sources`.
        """
        totals = {
            name: None
            if any(name not in facts for facts in self._facts)
            else sum(facts[name] for facts in self._facts)
            for name in ("documents", "tokens", "bytes", "rows")
        }
        skipped: dict[str, dict[str, Any]] = {}
        for facts in self._facts:
            for reason, entry in facts["skipped"].items():
                total = skipped.setdefault(reason, {"count": 0, "first": entry["first"]})
                total["count"] += entry["count"]
        return totals | {
            "split": self._split,
            "content_hash": "+".join(facts["content_hash"] for facts in self._facts),
            "skipped": skipped,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "sources": self._facts,
        }

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        first = self._row
        self._row += len(self._mine)
        if self._mix is None:
            return self._parts[0].take(first, self._mine)
        part_B, number_B = np.array([self._mix[first + k] for k in range(len(self._mine))]).T
        batch: Batch = {}
        mine_at = np.cumsum(self._mine) - 1
        for number, part in enumerate(self._parts):
            of_part = part_B == number
            if not of_part.any():
                continue
            rows = part.take(int(number_B[of_part][0]), self._mine[of_part])
            for name, values in rows.items():
                whole = batch.setdefault(
                    name, np.empty((self._mine.sum(), *values.shape[1:]), values.dtype)
                )
                whole[mine_at[of_part & self._mine]] = values
        return batch

    def epoch(self) -> Iterator[Batch]:
        """Yields every document of the split once, without moving the pipeline's own position.

        Sources follow each other, whatever their weights; each ends with a batch that empty rows
        (all weights 0) fill up. All hosts get the same number of batches. For exact evaluation.
        """
        for part in self._parts:
            yield from part.epoch(self._mine)

    def get_state(self) -> dict[str, Any]:
        """The position before the next batch: a dict fit for JSON, the same on all hosts."""
        return {
            "format": _FORMAT,
            "row": self._row,
            "streams": [part.get_state() for part in self._parts],
            "identity": self._identity(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position, which any number of hosts may have saved.

        Raises:
            ValueError: the position belongs to other data, another order or another format.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the data position has format {state.get('format')!r}; expected {_FORMAT}: it was "
                "saved by another version"
            )
        saved, own = state["identity"], self._identity()
        different = [
            f"{name} was {saved.get(name)!r} and is {own.get(name)!r}"
            for name in sorted(saved.keys() | own.keys())
            if saved.get(name) != own.get(name)
        ]
        if different:
            raise ValueError(
                "the data position was saved with other data: " + "; ".join(different) + ". "
                "Go back to the saved settings, or start in a new workdir"
            )
        self._row = state["row"]
        for part, position in zip(self._parts, state["streams"], strict=True):
            part.set_state(position)

    def _identity(self) -> dict[str, Any]:
        """All that decides which tokens stand in a row of a given number."""
        config = self._config
        streamed = any(source.streaming for source in config.sources)
        return {
            "split": self._split,
            "seed": self._seed,
            "tokenizer": self.tokenizer.fingerprint,
            "sequence_length": config.sequence_length,
            "packing": config.packing,
            "shuffle": config.shuffle,
            "shuffle_window": config.shuffle_window if streamed else None,
            "eval_fraction": config.eval_fraction,
            "sources": [
                [*reading_key(source, facts["content_hash"]), source.streaming, source.weight]
                for source, facts in zip(config.sources, self._facts, strict=True)
            ],
        }


def _mix(weights: list[float]) -> Any:
    """Row number -> (source, number of the row within the source), spread evenly by weight."""
    if len(weights) == 1:
        return None
    import grain

    def numbered(source: int) -> Any:
        return grain.MapDataset.range(_ENDLESS).map(lambda number: (source, number))

    return grain.MapDataset.mix([numbered(i) for i in range(len(weights))], weights)
