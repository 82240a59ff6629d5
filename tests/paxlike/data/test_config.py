"""Configurations that cannot work are refused with name, value and fix; import is cheap."""

import subprocess
import sys

import pytest

from paxlike.data.config import DataConfig, SourceConfig

_TEXT = SourceConfig(kind="text", paths=("a",))
_SYNTHETIC = SourceConfig(kind="synthetic")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "tfrecord"}, r"data.source.kind is 'tfrecord'; expected one of \('stdlib'"),
        ({"kind": "text"}, "data.source.paths is empty"),
        ({"kind": "text", "paths": ""}, "expected a tuple of strings"),
        ({"kind": "text", "paths": ("a",), "separator": ""}, "separator is empty"),
        ({"kind": "text", "paths": ("a",), "text_field": "x"}, "has no effect with kind 'text'"),
        ({"paths": ("a",)}, "has no effect with kind 'stdlib'"),
        ({"kind": "jsonl", "paths": ("a",), "separator": "x"}, "only with text"),
        ({"kind": "huggingface"}, "data.source.name is empty"),
        ({"kind": "synthetic", "vocab_size": 2}, "vocab_size is 2; expected at least 8"),
        ({"weight": 0.0}, "weight is 0.0; expected a positive number"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"max_document_bytes": 0}, "max_document_bytes is 0"),
    ],
)
def test_source_errors(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SourceConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": _TEXT, "mixture": (_TEXT, _TEXT)}, "are both given"),
        ({"packing": "best"}, "data.packing is 'best'; expected 'pack' or 'pad'"),
        ({"sequence_length": 0}, "data.sequence_length is 0"),
        ({"shuffle_window": 0}, "data.shuffle_window is 0"),
        ({"eval_fraction": 1.0}, "data.eval_fraction is 1.0"),
        ({"eval_fraction": -0.1}, "data.eval_fraction is -0.1"),
        ({"tokenizer": "words"}, "data.tokenizer is 'words'; expected 'byte'"),
        ({"tokenizer": "bpe:many"}, "for example bpe:4096"),
        ({"tokenizer": "bpe:100"}, "for example bpe:4096"),
        (
            {"tokenizer": "bpe:300", "source": SourceConfig(streaming=True)},
            "give a trained tokenizer.json",
        ),
        ({"tokenizer": "a.json", "source": _SYNTHETIC}, "no effect on a synthetic source"),
        ({"mixture": (_SYNTHETIC, _TEXT)}, "share one vocabulary"),
        (
            {"mixture": (_SYNTHETIC, SourceConfig(kind="synthetic", vocab_size=9))},
            "share one vocabulary",
        ),
    ],
)
def test_data_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_import_loads_no_reader():
    code = (
        "import sys, paxlike.data.config\n"
        "heavy = {'jax', 'grain', 'tokenizers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
