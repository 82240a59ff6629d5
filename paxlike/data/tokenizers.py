"""Tokenizers behind one small protocol: bytes, Hugging Face files, sentencepiece files, integers.

Decoding never raises: a model's padded vocabulary may produce ids that no tokenizer knows, and a
cut may fall within a character. Ids without text are dropped, broken UTF-8 becomes the replacement
character.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from paxlike.data.optional import optional_package

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_BOS_NAMES = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "[BOS]")
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]")
_PAD_NAMES = (PAD, "<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "[PAD]")


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: ids are below this.
        bos_id: begins each document; None where the vocabulary has no such token.
        eos_id: ends each document; None where the vocabulary has no such token.
        pad_id: fills rows; 0 where the vocabulary has no such token (its loss weight is 0 anyway).
        fingerprint: equal for tokenizers that encode alike; part of the data's identity.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text alone (int32), without begin and end of document."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special and unknown ids have none."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8 of the ids' text, for bits-per-byte; a cut character is kept where it is known."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8, then begin, end and padding."""

    vocab_size = 259
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id = 258
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(_known(ids, 256))


class IntegerTokenizer:
    """Ids written as decimal numbers: the vocabulary of the synthetic source."""

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = f"integer:{vocab_size}"

    def encode(self, text: str) -> np.ndarray:
        return np.array(text.split(), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, _known(ids, self.vocab_size)))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or one trained here."""

    def __init__(self, tokenizer: Any) -> None:
        # A document that spells a special token must not become one.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_id = self._first_id(_BOS_NAMES)
        self.eos_id = self._first_id(_EOS_NAMES)
        self.pad_id = self._first_id(_PAD_NAMES) or 0
        self.fingerprint = "tokenizer.json:" + _digest(tokenizer.to_str().encode())

    def _first_id(self, names: Sequence[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((id for id in ids if id is not None), None)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(_known(ids, self.vocab_size), skip_special_tokens=True)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def save(self, path: str) -> None:
        """Writes the `tokenizer.json`."""
        self._tokenizer.save(path)


class SentencePieceTokenizer:
    """A sentencepiece `.model` file."""

    def __init__(self, model: bytes) -> None:
        if not model:  # sentencepiece takes an empty model for none given.
            raise ValueError("the file is empty")
        sentencepiece = optional_package("sentencepiece", needed_by="data.tokenizer '.model'")
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        self.pad_id = _id_or_none(self._processor.pad_id()) or 0
        self.fingerprint = "sentencepiece:" + _digest(model)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(_known(ids, self.vocab_size))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()


def load_tokenizer(path: str) -> Tokenizer:
    """Reads a tokenizer from a file.

    Args:
        path: a `tokenizer.json` (Hugging Face) or a `.model` (sentencepiece).

    Raises:
        ValueError: the file is missing or is not what its name says.
    """
    if not os.path.isfile(path):
        raise ValueError(f"data.tokenizer is {path!r}; there is no such file")
    with open(path, "rb") as file:
        content = file.read()
    try:
        if path.endswith(".model"):
            return SentencePieceTokenizer(content)
        import tokenizers

        return HuggingFaceTokenizer(tokenizers.Tokenizer.from_buffer(content))
    except Exception as error:  # Both libraries raise their own, unrelated types.
        form = "sentencepiece model" if path.endswith(".model") else "tokenizer.json"
        raise ValueError(f"data.tokenizer is {path!r}, not a readable {form}: {error}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE tokenizer.

    Args:
        texts: documents.
        vocab_size: ids in all, the 256 bytes and three special tokens included. A small corpus may
            run out of pairs to merge and give fewer.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(tokenizer)


def _known(ids: Iterable[int], size: int) -> list[int]:
    return [int(id) for id in ids if 0 <= id < size]


def _id_or_none(id: int) -> int | None:
    return None if id < 0 else id


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
