"""Every format gives what was written, from any start; damage is counted or named."""

import json
import os
import pathlib
import sys
import tracemalloc

import pytest

from paxlike.data.config import DataConfig, SourceConfig
from paxlike.data.pipeline import build
from paxlike.data.sources import open_source
from paxlike.data.stdlib_corpus import stdlib_files

_FORMS = [
    "text", "separated_text", "jsonl", "parquet", "arrayrecord", "arrayrecord_json",
    "huggingface_saved", "huggingface_files",
]  # fmt: skip


def _texts(source, start=0):
    records = list(open_source(source).records(start))
    assert not any(record.problem for record in records)
    return [record.text for record in records]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", _FORMS)
def test_reads_what_was_written_from_any_start(write, texts, form, streaming):
    source = write(form)
    source = SourceConfig(**(vars(source) | {"streaming": streaming}))
    for start in (0, 1, 14, 15, 16, 33, len(texts), len(texts) + 5):
        assert _texts(source, start) == texts[start:]


@pytest.mark.parametrize("form", _FORMS)
def test_identity_is_the_content(write, texts, form):
    source = open_source(write(form))
    assert source.identity() == source.identity()
    if form != "arrayrecord_json":
        assert source.identity() == open_source(write(form)).identity()
    changed = texts[:-1] + [texts[-1].replace("a", "b", 1)]
    assert source.identity() != open_source(write(form, changed)).identity()


def test_stdlib_has_sources_and_documentation_but_no_tests():
    names = [path.replace(os.sep, "/") for path in stdlib_files()]
    assert any(name.endswith("/pydoc_data/topics.py") for name in names)
    assert any(name.endswith("/asyncio/tasks.py") for name in names)
    for part in ("/test/", "/tests/", "/site-packages/", "/idle_test/", "/__pycache__/"):
        assert not any(part in name.split("/lib/python", 1)[-1] for name in names)
    assert names == stdlib_files()


def test_synthetic_documents_repeat_their_first_half():
    config = SourceConfig(kind="synthetic", vocab_size=50, num_documents=9)
    documents = [list(map(int, text.split())) for text in _texts(config)]
    assert len(documents) == 9
    followers = {}
    for document in documents:
        half = len(document) // 2
        assert document[:half] == document[half:]
        assert all(0 <= id < 50 for id in document)
        for a, b in zip(document[: half - 1], document[1:half], strict=True):
            followers.setdefault(a, set()).add(b)
    assert max(map(len, followers.values())) <= 4
    assert _texts(config) == _texts(config)
    other = SourceConfig(kind="synthetic", vocab_size=50, num_documents=9, generator_seed=1)
    assert _texts(config) != _texts(other)


# ---- damage


def _skipped(source):
    config = DataConfig(source=source, sequence_length=8, eval_fraction=0.0)
    info = build(config, global_batch_size=1, split="train", seed=0).info
    return info["documents"], {reason: e["count"] for reason, e in info["skipped"].items()}


def test_damaged_text_files_are_counted(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "long.txt").write_bytes(b"x" * 101)
    source = SourceConfig(kind="text", paths=(f"{tmp_path}/*.txt",), max_document_bytes=100)
    documents, skipped = _skipped(source)
    assert documents == 1
    assert skipped == {"not UTF-8": 1, "empty": 1, "longer than max_document_bytes=100": 1}


def test_damaged_parts_of_a_text_file_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one|caf\xe9|| \n|" + b"y" * 200 + b"|two")
    (tmp_path / "empty.txt").write_bytes(b"")
    source = SourceConfig(
        kind="text", paths=(f"{tmp_path}/*.txt",), separator="|", max_document_bytes=100
    )
    documents, skipped = _skipped(source)
    assert documents == 2
    assert skipped == {"not UTF-8": 1, "empty": 3, "longer than max_document_bytes=100": 1}


def test_damaged_json_lines_are_counted(tmp_path):
    lines = [
        b'{"text": "good"}',
        b'{"text": "caf\xe9"}',
        b'{"text": "cut',
        b'{"body": "another field"}',
        b'["no object"]',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "lone \\ud800 surrogate"}',
        b"",
        b"[" * 200_000,
        b'{"text": "' + b"z" * 300_000 + b'"}',
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl").write_bytes(b"")
    source = SourceConfig(kind="jsonl", paths=(f"{tmp_path}/*.jsonl",), max_document_bytes=250_000)
    documents, skipped = _skipped(source)
    assert documents == 2
    assert skipped == {
        "not UTF-8": 2,
        "not JSON": 2,
        "no field 'text'": 2,
        "no text": 2,
        "empty": 2,
        "longer than max_document_bytes=250000": 1,
    }


def test_line_of_100_megabytes_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "first"}\n')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'\n{"text": "last"}\n')
    source = SourceConfig(kind="jsonl", paths=(str(path),), max_document_bytes=2**20)
    tracemalloc.start()
    records = list(open_source(source).records())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [record.text for record in records] == ["first", "", "last"]
    assert records[1].problem == "longer than max_document_bytes=1048576"
    assert peak < 8 * 2**20


def test_parquet_values_that_are_no_text_are_counted(tmp_path):
    import pyarrow
    import pyarrow.parquet

    values = pyarrow.array([b"good", b"caf\xe9", None, b""], pyarrow.binary())
    bad = pyarrow.StringArray.from_buffers(4, values.buffers()[1], values.buffers()[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    source = SourceConfig(kind="parquet", paths=(f"{tmp_path}/a.parquet",))
    documents, skipped = _skipped(source)
    assert documents == 1
    assert skipped == {"not UTF-8": 1, "empty": 2}


@pytest.mark.parametrize(
    ("form", "pattern"), [("parquet", "a.parquet"), ("arrayrecord", "a.array_record")]
)
def test_files_cut_short_are_named(write, form, pattern):
    source = write(form)
    path = next(p for p in (*source.paths, source.paths[0].replace("*", "a")) if pattern in p)
    whole = pathlib.Path(path).read_bytes()
    for size in (0, 1, 4, 100, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        pathlib.Path(path).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{path} is not a whole"):
            _skipped(source)


def test_overwritten_bytes_are_named_or_skipped(write):
    source = write("arrayrecord")
    path = source.paths[0].replace("*", "a")
    whole = bytearray(pathlib.Path(path).read_bytes())
    whole[300:340] = b"?" * 40
    pathlib.Path(path).write_bytes(whole)
    with pytest.raises(ValueError, match=f"{path} is not a whole ArrayRecord file"):
        _skipped(source)


def test_missing_column_lists_the_columns(write):
    source = write("parquet")
    wrong = SourceConfig(kind="parquet", paths=source.paths, text_field="txet")
    with pytest.raises(ValueError, match=r"text_field is 'txet'.*\['id', 'text'\]"):
        _skipped(wrong)
    with pytest.raises(ValueError, match="column 'id' is int64; expected text"):
        _skipped(SourceConfig(kind="parquet", paths=source.paths, text_field="id"))
    saved = write("huggingface_saved")
    with pytest.raises(ValueError, match=r"text_field is 'txet'.*\['text'\]"):
        _skipped(SourceConfig(kind="huggingface", name=saved.name, text_field="txet"))


def test_paths_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match="nothing matches '.*none"):
        _skipped(SourceConfig(kind="text", paths=(f"{tmp_path}/none*",)))
    with pytest.raises(ValueError, match="is not a regular file; for a folder give a pattern"):
        _skipped(SourceConfig(kind="text", paths=(str(tmp_path),)))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="pipe.txt is not a regular file"):
        _skipped(SourceConfig(kind="text", paths=(f"{tmp_path}/*.txt",)))
    with pytest.raises(ValueError, match="cannot load dataset '.*absent'"):
        _skipped(SourceConfig(kind="huggingface", name=f"{tmp_path}/absent"))


@pytest.mark.parametrize("streaming", [False, True])
def test_source_without_any_document_says_why(tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    source = SourceConfig(kind="jsonl", paths=(f"{tmp_path}/a.jsonl",), streaming=streaming)
    with pytest.raises(ValueError, match="no document in the train split .*no field 'text'"):
        next(build(DataConfig(source=source), global_batch_size=1, split="train", seed=0))


def test_missing_package_is_named(write, monkeypatch):
    source = write("parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="kind 'parquet' needs the package pyarrow.*pip install"):
        _skipped(source)


def test_damaged_dataset_files_are_named(write):
    source = write("huggingface_files")
    path = pathlib.Path(source.name) / "a.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    for streaming in (False, True):
        broken = SourceConfig(**(vars(source) | {"streaming": streaming}))
        with pytest.raises(ValueError, match="data.source: .*dataset"):
            next(build(DataConfig(source=broken), global_batch_size=1, split="train", seed=0))
