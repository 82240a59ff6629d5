"""Each test has a cache of its own, and files in every format that hold the same documents."""

import json

import pytest

from paxlike.data.config import SourceConfig

TEXTS = [f"document {i} " + "ab" * (7 * i % 23) + " é" for i in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PAXLIKE_CACHE", str(folder))
    return folder


def write_text(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text)
    return SourceConfig(kind="text", paths=(f"{folder}/*.txt",))


def write_separated(folder, texts):
    (folder / "a.txt").write_text("<end>".join(texts[:10]))
    (folder / "b.txt").write_text("<end>".join(texts[10:]) + "<end>\n")
    return SourceConfig(kind="text", paths=(f"{folder}/*.txt",), separator="<end>")


def write_jsonl(folder, texts):
    lines = [json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(lines[:15]))
    (folder / "b.jsonl").write_text("".join(lines[15:]).rstrip("\n"))
    return SourceConfig(kind="jsonl", paths=(f"{folder}/*.jsonl",), text_field="body")


def write_parquet(folder, texts):
    import pyarrow
    import pyarrow.parquet

    for name, part in (("a", texts[:15]), ("b", texts[15:])):
        table = pyarrow.table({"id": list(range(len(part))), "text": part})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=4)
    return SourceConfig(kind="parquet", paths=(f"{folder}/a.parquet", f"{folder}/b.parquet"))


def write_arrayrecord(folder, texts):
    from array_record.python.array_record_module import ArrayRecordWriter

    for name, part in (("a", texts[:15]), ("b", texts[15:])):
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for text in part:
            writer.write(text.encode())
        writer.close()
    return SourceConfig(kind="arrayrecord", paths=(f"{folder}/*.array_record",))


def write_arrayrecord_json(folder, texts):
    source = write_arrayrecord(folder, [json.dumps({"text": text}) for text in texts])
    return SourceConfig(kind=source.kind, paths=source.paths, text_field="text")


def write_huggingface_saved(folder, texts):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "saved"))
    return SourceConfig(kind="huggingface", name=str(folder / "saved"))


def write_huggingface_files(folder, texts):
    import datasets

    datasets.disable_progress_bars()
    write_parquet(folder, texts)
    return SourceConfig(kind="huggingface", name=str(folder))


WRITERS = {
    "text": write_text,
    "separated_text": write_separated,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrayrecord": write_arrayrecord,
    "arrayrecord_json": write_arrayrecord_json,
    "huggingface_saved": write_huggingface_saved,
    "huggingface_files": write_huggingface_files,
}


@pytest.fixture
def write(tmp_path):
    """Writes documents in a format and gives the source that reads them."""

    def write(form, texts=TEXTS):
        folder = tmp_path / f"files-{form}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return WRITERS[form](folder, list(texts))

    return write


@pytest.fixture
def texts():
    return list(TEXTS)
