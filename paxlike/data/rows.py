"""The row streams of one source: random access into a finite corpus, or a walk along a stream.

Both give the same interface: rows by number, of which a host materialises only its own. A finite
corpus needs no position: row k of epoch e is computed. A stream's position is four integers (epoch,
first record of the window being read, document in the shuffled window, token in the document), and
restoring it reads that one window again; no buffer is saved. Every host walks the whole stream,
because only the documents before a row say where it begins: tokenizing is repeated on each host.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from paxlike.data.config import DataConfig
from paxlike.data.corpus import Corpus, Skips, document_tokens, split_of
from paxlike.data.packing import Batch, Packed, Padded, cut
from paxlike.data.sources import Source
from paxlike.data.tokenizers import Tokenizer


@functools.cache
def _epoch_seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class Rows(Protocol):
    """Rows of one source in the order of training."""

    def take(self, first: int, mine: np.ndarray) -> Batch:
        """Gives the rows of this host among the next ones.

        Args:
            first: number of the first of the rows.
            mine: [rows] bool, which of the rows from `first` on to make.
        """
        ...

    def epoch(self, mine: np.ndarray) -> Iterator[Batch]:
        """Every document once, in batches of len(mine) rows; the last is filled with empty rows."""
        ...

    def get_state(self) -> dict[str, int] | None:
        """Position after the rows taken; None where the row number says it all."""
        ...

    def set_state(self, state: dict[str, int] | None) -> None:
        """Goes to a position."""
        ...


class CorpusRows:
    """Rows of a tokenized corpus, each epoch in a random order of its own."""

    def __init__(
        self, corpus: Corpus, config: DataConfig, *, seed: tuple[int, ...], pad_id: int
    ) -> None:
        # Here, for grain takes a second to import and is needed for training only.
        from grain.experimental import index_shuffle

        self._permute = index_shuffle
        self._corpus = corpus
        self._length = config.sequence_length
        self._shuffle = config.shuffle
        self._seed = seed
        self._pad_id = pad_id
        layout = Packed if config.packing == "pack" else Padded
        self._layout = layout(corpus.offsets, config.sequence_length)
        self.num_rows = self._layout.num_rows

    def take(self, first: int, mine: np.ndarray) -> Batch:
        return self._cut(
            np.array([self._row(first + int(k)) for k in np.flatnonzero(mine)], np.int64)
        )

    def epoch(self, mine: np.ndarray) -> Iterator[Batch]:
        for first in range(0, self.num_rows, len(mine)):
            numbers = first + np.flatnonzero(mine)
            # Rows from num_rows on are empty.
            yield self._cut(
                np.array([self._row(int(k)) if k < self.num_rows else k for k in numbers], np.int64)
            )

    def get_state(self) -> None:
        return None

    def set_state(self, state: dict[str, int] | None) -> None:
        assert state is None

    def _row(self, number: int) -> int:
        epoch, row = divmod(number, self.num_rows)
        if not self._shuffle:
            return row
        seed = _epoch_seed(*self._seed, epoch)
        return self._permute(row, max_index=self.num_rows - 1, seed=seed, rounds=4)

    def _cut(self, rows: np.ndarray) -> Batch:
        starts, limits = self._layout.window(rows)
        corpus = self._corpus
        return cut(corpus.tokens, corpus.offsets, starts, limits, self._length, self._pad_id)


class StreamRows:
    """Rows of a source that is tokenized on the way."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        split: str,
        seed: tuple[int, ...],
        repeat: bool = True,
    ) -> None:
        self._arguments = (source, config, tokenizer)
        self._options: dict[str, Any] = {"split": split, "seed": seed}
        self._source = source
        self._config = config
        self._tokenizer = tokenizer
        self._split = split
        self._seed = seed
        self._repeat = repeat
        self._skips = Skips()
        self._open(0, 0)

    @property
    def skipped(self) -> dict[str, dict[str, Any]]:
        """Records passed over since the start of this process, by reason."""
        return self._skips.reasons

    def take(self, first: int, mine: np.ndarray) -> Batch:
        del first  # A stream knows where it is.
        rows = [self._cut([], [])]  # A mixture may leave this host no row of this source.
        for wanted in mine:
            start, limit = self._next_row()
            if wanted:
                rows.append(self._cut([start], [limit]))
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}

    def epoch(self, mine: np.ndarray) -> Iterator[Batch]:
        once = StreamRows(*self._arguments, **self._options, repeat=False)
        while once._fill():
            yield once.take(0, mine)

    def get_state(self) -> dict[str, int]:
        names = ("epoch", "record", "document", "token")
        if self._at == len(self._tokens):
            return dict(zip(names, (self._epoch, self._next_record, 0, 0), strict=True))
        document = int(np.searchsorted(self._offsets, self._at, "right")) - 1
        token = self._at - int(self._offsets[document])
        return dict(zip(names, (*self._origins[document], token), strict=True))

    def set_state(self, state: dict[str, int] | None) -> None:
        assert state is not None
        self._open(state["epoch"], state["record"])
        if state["document"] or state["token"]:
            self._read_window()
            self._at = int(self._offsets[state["document"]]) + state["token"]

    def _open(self, epoch: int, record: int) -> None:
        self._epoch = epoch
        self._next_record = record
        self._reader = self._source.records(record)
        self._found_in_epoch = record > 0
        self._ended = False
        self._tokens = np.empty(0, np.int32)
        self._offsets = np.zeros(1, np.int64)
        self._origins: list[tuple[int, int, int]] = []
        self._at = 0

    def _next_row(self) -> tuple[int, int]:
        """Window of the next row in the buffer; the position moves behind it."""
        self._fill()
        start, limit = self._at, len(self._tokens)
        if self._config.packing == "pad" and start < limit:
            limit = int(self._offsets[np.searchsorted(self._offsets, start, "right")])
        self._at = min(start + self._config.sequence_length, limit)
        return start, limit

    def _fill(self) -> bool:
        """Reads until the buffer holds the next row; False where nothing is left."""
        needed = self._config.sequence_length if self._config.packing == "pack" else 1
        while len(self._tokens) - self._at < needed and not self._ended:
            self._read_window()
        return self._at < len(self._tokens)

    def _read_window(self) -> None:
        """Appends the documents of the next window; at the end of the source, starts it again."""
        window = list(itertools.islice(self._reader, self._config.shuffle_window))
        if not window:
            self._end_epoch()
            return
        documents = [
            tokens
            for record in self._skips.documents(window)
            if split_of(record.text, self._config.eval_fraction) == self._split
            and len(tokens := document_tokens(self._tokenizer, record.text))
        ]
        if self._config.shuffle:
            seed = [*self._seed, self._epoch, self._next_record]
            order = np.random.default_rng(seed).permutation(len(documents))
            documents = [documents[i] for i in order]
        self._append(documents)
        self._next_record += len(window)
        self._found_in_epoch |= bool(documents)

    def _append(self, documents: list[np.ndarray]) -> None:
        # Documents read to their end are dropped; the one being read stays whole.
        done = int(np.searchsorted(self._offsets, self._at, "right")) - 1
        kept = int(self._offsets[done])
        origin = (self._epoch, self._next_record)
        self._origins = self._origins[done:] + [(*origin, i) for i in range(len(documents))]
        ends = np.cumsum([len(tokens) for tokens in documents], dtype=np.int64)
        self._tokens = np.concatenate([self._tokens[kept:], *documents])
        self._offsets = np.concatenate(
            [self._offsets[done:] - kept, ends + self._offsets[-1] - kept]
        )
        self._at -= kept

    def _end_epoch(self) -> None:
        if not self._found_in_epoch:
            reasons = {reason: entry["count"] for reason, entry in self._skips.reasons.items()}
            raise ValueError(
                f"data.source has no document in the {self._split} split (data.eval_fraction="
                f"{self._config.eval_fraction}; skipped records: {reasons or 'none'})"
            )
        if not self._repeat:
            self._ended = True
            return
        self._epoch += 1
        self._next_record = 0
        self._reader = self._source.records()
        self._found_in_epoch = False

    def _cut(self, starts: list[int], limits: list[int]) -> Batch:
        return cut(
            self._tokens,
            self._offsets,
            np.array(starts, np.int64),
            np.array(limits, np.int64),
            self._config.sequence_length,
            self._tokenizer.pad_id,
        )
