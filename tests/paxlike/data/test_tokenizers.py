"""Text survives encode and decode; decoding survives any id."""

import numpy as np
import pytest

from paxlike.data.config import DataConfig
from paxlike.data.corpus import document_tokens, make_tokenizer
from paxlike.data.tokenizers import ByteTokenizer, IntegerTokenizer, load_tokenizer, train_bpe

_SAMPLES = ["plain text", "naïve café – 東京 🚀", "  leading\n\ttabs ", "<|eos|> in the text", ""]


def _sentencepiece(folder, texts):
    import sentencepiece

    (folder / "corpus.txt").write_text("\n".join(texts * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "sp"), vocab_size=285,
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return load_tokenizer(str(folder / "sp.model"))


@pytest.fixture(params=["byte", "bpe", "sentencepiece"])
def tokenizer(request, tmp_path, texts):
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "bpe":
        return train_bpe(texts, 300)
    return _sentencepiece(tmp_path, texts)


def test_round_trip(tokenizer):
    for text in _SAMPLES:
        if "\n" in text and "Sentence" in type(tokenizer).__name__:
            continue  # Its training splits lines, but bytes bring the newline back.
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert all(0 <= id < tokenizer.vocab_size for id in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()


def test_text_never_becomes_a_special_token(tokenizer):
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    ids = tokenizer.encode("<|eos|><|bos|><|pad|><s></s>")
    assert special.isdisjoint(ids.tolist())


def test_decode_survives_any_id(tokenizer):
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = generator.integers(-5, tokenizer.vocab_size + 500, size=50)
        assert isinstance(tokenizer.decode(ids), str)
        assert isinstance(tokenizer.decode_bytes(ids), bytes)
    assert tokenizer.decode([tokenizer.vocab_size, -1, 2**31 - 1]) == ""


def test_documents_begin_and_end(tokenizer):
    ids = document_tokens(tokenizer, "text")
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids) == "text"


def test_bytes_know_a_cut_character():
    ids = ByteTokenizer().encode("é")[:1]
    assert ByteTokenizer().decode(ids) == "\ufffd"
    assert ByteTokenizer().decode_bytes(ids) == b"\xc3"


def test_integers():
    tokenizer = IntegerTokenizer(30)
    assert tokenizer.encode("3 29 0").tolist() == [3, 29, 0]
    assert tokenizer.decode([3, 29, 0, 30, -1]) == "3 29 0"
    assert document_tokens(tokenizer, "3 4").tolist() == [3, 4]


def test_trained_bpe_compresses_and_is_cached(write, texts, cache):
    config = DataConfig(source=write("jsonl"), tokenizer="bpe:300")
    tokenizer = make_tokenizer(config)
    assert tokenizer.vocab_size == 300
    text = "document " * 10
    assert len(tokenizer.encode(text)) < len(text) / 3
    (file,) = (cache / "tokenizers").iterdir()
    written = file.stat().st_mtime_ns
    assert make_tokenizer(config).fingerprint == tokenizer.fingerprint
    assert file.stat().st_mtime_ns == written
    # The same file, given by its path, is the same tokenizer.
    assert load_tokenizer(str(file)).fingerprint == tokenizer.fingerprint
    file.unlink()
    assert make_tokenizer(config).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("name", ["broken.json", "broken.model"])
def test_unreadable_files_are_named(tmp_path, name):
    with pytest.raises(ValueError, match="there is no such file"):
        load_tokenizer(str(tmp_path / name))
    for content in (b"", b"{}", b"\x00\xff" * 50):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}', not a readable"):
            load_tokenizer(str(tmp_path / name))
