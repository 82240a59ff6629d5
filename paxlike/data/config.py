"""What is read and how it becomes rows of tokens, as frozen data. Free of JAX and of readers.

One `DataConfig` has one `source`, or a weighted `mixture` of several. Facts that need the file
system (a pattern that matches nothing, a missing column) are checked when the pipeline is built.
"""

import dataclasses
from typing import Literal

SourceKind = Literal[
    "stdlib", "text", "jsonl", "parquet", "arrayrecord", "huggingface", "synthetic"
]
_FILE_KINDS = ("text", "jsonl", "parquet", "arrayrecord")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where documents come from.

    Attributes:
        kind: `stdlib` is the Python standard library of the running interpreter; `text` is one
            document a file; `synthetic` is generated and needs no tokenizer.
        paths: files or glob patterns (`**` recurses) of the file kinds; read in sorted order.
        text_field: field or column that holds the text. None is `text` for jsonl, parquet and
            huggingface, and the whole record for arrayrecord.
        separator: `text` only: what separates documents within a file; None is one document a file.
        name: huggingface: dataset name, or a local folder (of data files, or of `save_to_disk`).
        subset: huggingface: configuration of the dataset; None is its default.
        dataset_split: huggingface: split of the dataset that is read.
        streaming: read and tokenize on the way instead of tokenizing all of it once into the cache.
            For corpora too large to tokenize ahead; every host reads the whole stream.
        max_document_bytes: longer documents are skipped and counted.
        vocab_size: synthetic: token ids are below this.
        num_documents: synthetic: documents generated.
        generator_seed: synthetic: which language and documents are generated.
        weight: share of the rows of a mixture, relative to the other sources' weights.
    """

    kind: SourceKind = "stdlib"
    paths: tuple[str, ...] = ()
    text_field: str | None = None
    separator: str | None = None
    name: str | None = None
    subset: str | None = None
    dataset_split: str = "train"
    streaming: bool = False
    max_document_bytes: int = 32 * 2**20
    vocab_size: int = 256
    num_documents: int = 4096
    generator_seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        kinds = SourceKind.__args__
        if self.kind not in kinds:
            raise ValueError(f"data.source.kind is {self.kind!r}; expected one of {kinds}")
        if not isinstance(self.paths, tuple) or not all(isinstance(p, str) for p in self.paths):
            raise TypeError(
                f"data.source.paths is {self.paths!r}; expected a tuple of strings, "
                "for example ('corpus/*.jsonl',)"
            )
        if self.kind in _FILE_KINDS and not self.paths:
            raise ValueError(
                f"data.source.paths is empty; kind {self.kind!r} needs files or glob patterns"
            )
        if self.kind == "huggingface" and not self.name:
            raise ValueError(
                "data.source.name is empty; kind 'huggingface' needs a dataset or a local folder"
            )
        self._reject_fields_without_effect()
        for field, least in (
            ("max_document_bytes", 1),
            ("vocab_size", 8),
            ("num_documents", 1),
            ("generator_seed", 0),
        ):
            if getattr(self, field) < least:
                raise ValueError(
                    f"data.source.{field} is {getattr(self, field)}; expected at least {least}"
                )
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"data.source.weight is {self.weight}; expected a positive number")
        if self.separator == "":
            raise ValueError("data.source.separator is empty; expected text, or None for no split")

    def _reject_fields_without_effect(self) -> None:
        used_by = {
            "paths": _FILE_KINDS,
            "text_field": ("jsonl", "parquet", "arrayrecord", "huggingface"),
            "separator": ("text",),
            "name": ("huggingface",),
            "subset": ("huggingface",),
            "dataset_split": ("huggingface",),
            "vocab_size": ("synthetic",),
            "num_documents": ("synthetic",),
            "generator_seed": ("synthetic",),
        }
        for field in dataclasses.fields(self):
            kinds = used_by.get(field.name)
            if kinds and self.kind not in kinds and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"data.source.{field.name} is {getattr(self, field.name)!r}, which has no "
                    f"effect with kind {self.kind!r} (only with {', '.join(kinds)}); leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads.

    Attributes:
        source: where documents come from, when it is one place.
        mixture: several places, each with its weight; then `source` stays at its default.
        tokenizer: `byte`; `bpe:<vocabulary size>`, trained on the train split and cached; or the
            path of a `tokenizer.json` (Hugging Face) or of a `.model` (sentencepiece).
        sequence_length: tokens of a row.
        packing: `pack` joins documents and cuts the stream into full rows; `pad` starts each
            document in a row of its own (a longer one goes on in the next row) and pads the rest.
            Neither drops a token.
        shuffle: rows in random order, another each epoch; streaming sources shuffle documents
            within windows.
        shuffle_window: records that a streaming source reads, and shuffles, at a time.
        eval_fraction: share of documents, chosen by the hash of their content, kept for evaluation;
            equal documents are never in both splits.
    """

    source: SourceConfig = SourceConfig()
    mixture: tuple[SourceConfig, ...] = ()
    tokenizer: str = "byte"
    sequence_length: int = 256
    packing: Literal["pack", "pad"] = "pack"
    shuffle: bool = True
    shuffle_window: int = 1024
    eval_fraction: float = 0.05

    def __post_init__(self) -> None:
        if self.mixture and self.source != SourceConfig():
            raise ValueError(
                "data.source and data.mixture are both given; move the source into the mixture"
            )
        if self.packing not in ("pack", "pad"):
            raise ValueError(f"data.packing is {self.packing!r}; expected 'pack' or 'pad'")
        for field in ("sequence_length", "shuffle_window"):
            if getattr(self, field) < 1:
                raise ValueError(f"data.{field} is {getattr(self, field)}; expected at least 1")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"data.eval_fraction is {self.eval_fraction}; expected 0 <= x < 1")
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        kind, _, size = self.tokenizer.partition(":")
        if kind == "bpe":
            if not (size.isascii() and size.isdigit() and int(size) >= 260):
                raise ValueError(
                    f"data.tokenizer is {self.tokenizer!r}; expected bpe:<vocabulary size of at "
                    "least 260> (256 bytes, three special tokens, one merge), for example bpe:4096"
                )
            if any(source.streaming for source in self.sources):
                raise ValueError(
                    f"data.tokenizer is {self.tokenizer!r}, which is trained on a corpus read as a "
                    "whole, and a source has streaming=True; give a trained tokenizer.json"
                )
        elif self.tokenizer != "byte" and not self.tokenizer.endswith((".json", ".model")):
            raise ValueError(
                f"data.tokenizer is {self.tokenizer!r}; expected 'byte', 'bpe:<vocabulary size>', "
                "or the path of a tokenizer.json or of a sentencepiece .model"
            )
        synthetic = [source for source in self.sources if source.kind == "synthetic"]
        if synthetic and self.tokenizer != "byte":
            raise ValueError(
                f"data.tokenizer is {self.tokenizer!r}, which has no effect on a synthetic source; "
                "leave it out"
            )
        if synthetic and (
            len(synthetic) < len(self.sources) or len({s.vocab_size for s in synthetic}) > 1
        ):
            raise ValueError(
                "data.mixture mixes a synthetic source with text, or with another vocab_size; "
                "expected sources that share one vocabulary"
            )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """All sources: the mixture, or the one source."""
        return self.mixture or (self.source,)
