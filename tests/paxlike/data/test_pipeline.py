"""The batches of any number of hosts are one stream, which can be left and resumed at any step."""

import collections
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from paxlike.data.config import DataConfig, SourceConfig
from paxlike.data.corpus import document_tokens, split_of
from paxlike.data.pipeline import build

_B, _T = 4, 16
_EOS = 257


def _build(config, split="train", *, seed=1, batch=_B, hosts=1, host=0):
    return build(
        config, global_batch_size=batch, split=split, seed=seed, num_hosts=hosts, host_index=host
    )


def _global(pipelines):
    """The hosts' batches, one below the other."""
    batches = [next(pipeline) for pipeline in pipelines]
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def _assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def _streamed(source, **fields):
    return dataclasses.replace(source, streaming=True, **fields)


@pytest.fixture(
    params=["pack", "pad", "unshuffled", "stream", "stream_pad", "mixture", "mixture_streams"]
)
def config(request, write, texts):
    """One configuration for each way in which rows come about; a few epochs in twenty steps."""
    source = write("jsonl")
    common = {"sequence_length": _T, "eval_fraction": 0.5, "shuffle_window": 7}
    other = write("text", [f"other {text}" for text in texts[:9]])
    mixture = (dataclasses.replace(source, weight=2.0), other)
    fields = {
        "pack": {"source": source},
        "pad": {"source": source, "packing": "pad"},
        "unshuffled": {"source": source, "shuffle": False},
        "stream": {"source": _streamed(source)},
        "stream_pad": {"source": _streamed(source), "packing": "pad"},
        "mixture": {"mixture": mixture},
        "mixture_streams": {"mixture": (_streamed(source, weight=2.0), _streamed(other), other)},
    }
    return DataConfig(**(common | fields[request.param]))


def test_resume_is_exact_at_every_step(config):
    pipeline = _build(config)
    states, batches = [], []
    for _ in range(45):
        states.append(json.dumps(pipeline.get_state()))
        batches.append(next(pipeline))
    resumed = _build(config)
    for step, state in enumerate(states[:-2]):
        resumed.set_state(json.loads(state))
        assert resumed.get_state() == json.loads(state)
        for want in batches[step : step + 2]:
            _assert_equal(next(resumed), want)


def test_hosts_share_one_stream_and_one_state(config):
    alone = _build(config)
    hosts = [_build(config, hosts=2, host=h) for h in range(2)]
    quarters = [_build(config, hosts=4, host=h) for h in range(4)]
    for _ in range(25):
        want = next(alone)
        _assert_equal(_global(hosts), want)
        _assert_equal(_global(quarters), want)
        for pipeline in hosts + quarters:
            assert pipeline.get_state() == alone.get_state()


def test_number_of_hosts_may_change_on_resume(config):
    """4 hosts, then 1, then 2: the same batches as one host that was never stopped."""
    want = _build(config)
    state = None
    for hosts, steps in ((4, 7), (1, 6), (2, 9), (4, 3)):
        pipelines = [_build(config, hosts=hosts, host=h) for h in range(hosts)]
        for pipeline in pipelines:
            if state is not None:
                pipeline.set_state(json.loads(json.dumps(state)))
        for _ in range(steps):
            _assert_equal(_global(pipelines), next(want))
        state = pipelines[-1].get_state()


def test_another_batch_size_goes_on_at_the_same_row(config):
    pipeline = _build(config, batch=6)
    for _ in range(4):
        next(pipeline)
    smaller = _build(config, batch=2)
    smaller.set_state(pipeline.get_state())
    want = next(pipeline)
    got = [next(smaller) for _ in range(3)]
    _assert_equal({name: np.concatenate([g[name] for g in got]) for name in want}, want)


def test_runs_repeat_and_seeds_differ(config):
    first, second, other = _build(config), _build(config), _build(config, seed=2)
    ours, theirs = [], []
    for _ in range(10):
        batch = next(first)
        _assert_equal(next(second), batch)
        ours.append(batch["tokens"])
        theirs.append(next(other)["tokens"])
    assert np.array_equal(ours, theirs) == (not config.shuffle)


def _expected(texts, tokenizer, split, fraction):
    return [document_tokens(tokenizer, t) for t in texts if split_of(t, fraction) == split]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_epoch_has_every_token_once(write, texts, streaming, packing, hosts):
    source = dataclasses.replace(write("jsonl"), streaming=streaming)
    config = DataConfig(
        source=source, sequence_length=_T, eval_fraction=0.3, packing=packing, shuffle_window=7
    )
    for split in ("train", "eval"):
        pipelines = [_build(config, split, hosts=hosts, host=h) for h in range(hosts)]
        before = pipelines[0].get_state()
        batches = list(itertools.chain(*(pipeline.epoch() for pipeline in pipelines)))
        assert pipelines[0].get_state() == before
        want = _expected(texts, pipelines[0].tokenizer, split, 0.3)
        got = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in batches])
        assert sorted(got.tolist()) == sorted(np.concatenate(want).tolist())
        assert sum(b["loss_weights"].sum() for b in batches) == sum(len(d) - 1 for d in want)


def test_steps_of_an_epoch_are_the_epoch(write):
    """The endless iterator loses and repeats nothing, over four hosts, one, then two."""
    config = DataConfig(source=write("jsonl"), sequence_length=_T, eval_fraction=0.3)
    rows = _build(config).info["rows"]
    want = sorted(
        tuple(row)
        for batch in _build(config).epoch()
        for row, weight in zip(batch["tokens"].tolist(), batch["segment_ids"].max(1), strict=True)
        if weight
    )
    assert len(want) == rows
    seen, state = [], None
    plan = itertools.cycle([(4, 3), (1, 4), (2, 5)])
    while len(seen) < 2 * rows:
        hosts, steps = next(plan)
        pipelines = [_build(config, hosts=hosts, host=h) for h in range(hosts)]
        for pipeline in pipelines:
            if state is not None:
                pipeline.set_state(state)
        for _ in range(steps):
            seen += map(tuple, _global(pipelines)["tokens"].tolist())
        state = pipelines[0].get_state()
    assert sorted(seen[:rows]) == want
    assert sorted(seen[rows : 2 * rows]) == want
    assert seen[:rows] != seen[rows : 2 * rows], "the second epoch has an order of its own"


def test_stream_passes_over_every_document_once_an_epoch(write, texts):
    config = DataConfig(
        source=_streamed(write("jsonl")), sequence_length=_T, eval_fraction=0.3, shuffle_window=7
    )
    pipeline = _build(config)
    want = collections.Counter(
        tuple(d.tolist()) for d in _expected(texts, pipeline.tokenizer, "train", 0.3)
    )
    total = sum(len(d) * n for d, n in want.items())
    tokens = []
    while len(tokens) < 3 * total:
        tokens += next(pipeline)["tokens"].reshape(-1).tolist()
    orders = []
    for epoch in range(3):
        part = tokens[epoch * total : (epoch + 1) * total]
        ends = [i + 1 for i, token in enumerate(part) if token == _EOS]
        orders.append([tuple(part[a:b]) for a, b in zip([0, *ends], ends, strict=False)])
        assert collections.Counter(orders[-1]) == want
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_are_disjoint_and_whole(write, texts, streaming):
    source = dataclasses.replace(write("text", texts + texts[:5]), streaming=streaming)
    config = DataConfig(source=source, sequence_length=256, packing="pad", eval_fraction=0.3)
    found = {}
    for split in ("train", "eval"):
        pipeline = _build(config, split)
        rows = np.concatenate([batch["tokens"] for batch in pipeline.epoch()])
        found[split] = {pipeline.tokenizer.decode(row) for row in rows} - {""}
    assert not found["train"] & found["eval"]
    assert found["train"] | found["eval"] == set(texts)


@pytest.mark.parametrize("streaming", [False, True])
def test_mixture_follows_its_weights(write, streaming):
    sources = tuple(
        dataclasses.replace(
            write("text", [f"{letter * 40} {i}" for i in range(30)]),
            weight=weight,
            streaming=streaming,
        )
        for letter, weight in (("a", 5.0), ("b", 3.0), ("c", 2.0))
    )
    config = DataConfig(mixture=sources, sequence_length=_T)
    pipeline = _build(config, batch=10)
    counts = collections.Counter()
    for step in range(1, 31):
        for row in next(pipeline)["tokens"]:
            text = pipeline.tokenizer.decode(row)
            counts[max("abc", key=text.count)] += 1
        for letter, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(counts[letter] - share * 10 * step) <= 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sequence_length": 8}, "sequence_length was 16 and is 8"),
        ({"packing": "pad"}, "packing was 'pack' and is 'pad'"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"eval_fraction": 0.2}, "eval_fraction was 0.3 and is 0.2"),
        ({"tokenizer": "bpe:300"}, "tokenizer was 'byte' and is 'tokenizer.json:"),
    ],
)
def test_state_of_another_configuration_is_refused(write, change, name):
    config = DataConfig(source=write("jsonl"), sequence_length=_T, eval_fraction=0.3)
    state = _build(config).get_state()
    other = _build(dataclasses.replace(config, **change))
    with pytest.raises(ValueError, match=name):
        other.set_state(state)


def test_state_of_other_content_seed_split_or_format_is_refused(write, texts):
    config = DataConfig(source=write("jsonl"), sequence_length=_T, eval_fraction=0.3)
    state = _build(config).get_state()
    moved = _build(dataclasses.replace(config, source=write("jsonl")))
    moved.set_state(state)  # The same content elsewhere is the same data.
    longer = dataclasses.replace(config, source=write("jsonl", [*texts, "one more"]))
    with pytest.raises(ValueError, match="sources was"):
        _build(longer).set_state(state)
    with pytest.raises(ValueError, match="seed was 1 and is 2"):
        _build(config, seed=2).set_state(state)
    with pytest.raises(ValueError, match="split was 'train' and is 'eval'"):
        _build(config, "eval").set_state(state)
    with pytest.raises(ValueError, match="has format None; expected 1"):
        _build(config).set_state({"row": 3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 6, "hosts": 4}, "global_batch_size is 6 on 4 hosts; expected a multiple of 4"),
        ({"batch": 0}, "global_batch_size is 0"),
        ({"hosts": 2, "host": 2}, "host_index is 2 of num_hosts 2"),
        ({"hosts": 0}, "host_index is 0 of num_hosts 0"),
        ({"seed": -1}, "seed is -1"),
        ({"split": "test"}, "split is 'test'"),
    ],
)
def test_bad_arguments(write, arguments, message):
    with pytest.raises(ValueError, match=message):
        _build(DataConfig(source=write("jsonl")), **arguments)


@pytest.mark.parametrize("streaming", [False, True])
def test_empty_eval_split_is_an_error(write, streaming):
    source = dataclasses.replace(write("jsonl"), streaming=streaming)
    with pytest.raises(ValueError, match=r"no document in the eval split \(data.eval_fraction=0"):
        next(_build(DataConfig(source=source, eval_fraction=0.0), "eval"))


def test_info_counts_what_is_read(write, texts):
    config = DataConfig(source=write("jsonl"), sequence_length=_T, eval_fraction=0.3)
    train, evaluation = _build(config).info, _build(config, "eval").info
    assert train["documents"] + evaluation["documents"] == len(texts)
    assert train["bytes"] + evaluation["bytes"] == sum(len(t.encode()) for t in texts)
    assert train["tokens"] == train["bytes"] + 2 * train["documents"]
    assert train["rows"] == -(-train["tokens"] // _T)
    assert train["content_hash"] == evaluation["content_hash"]
    assert (train["tokenizer"], train["vocab_size"], train["skipped"]) == ("byte", 259, {})
    json.dumps(train)
    streamed = _build(dataclasses.replace(config, source=_streamed(config.source))).info
    assert streamed["tokens"] is None and streamed["skipped"] == {}


def test_synthetic_needs_no_tokenizer():
    source = SourceConfig(kind="synthetic", vocab_size=40, num_documents=50)
    pipeline = _build(DataConfig(source=source, sequence_length=_T))
    assert pipeline.info["vocab_size"] == 40
    batch = next(pipeline)
    assert batch["tokens"].max() < 40 and batch["targets"].max() < 40


def test_default_corpus_is_the_standard_library():
    pipeline = _build(DataConfig(), batch=16)
    info = pipeline.info
    assert info["documents"] > 300 and info["bytes"] > 5_000_000
    assert info["documents"] + _build(DataConfig(), "eval").info["documents"] > 400
    assert next(pipeline)["tokens"].shape == (16, 256)


def test_cache_is_reused_and_mended(write, cache):
    config = DataConfig(source=write("jsonl"), sequence_length=_T)
    want = next(_build(config))
    (place,) = (cache / "corpora").iterdir()
    files = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    _assert_equal(next(_build(config)), want)
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == files
    for name in files:
        for content in (b"", (place / name).read_bytes()[:-3]):
            (place / name).write_bytes(content)
            _assert_equal(next(_build(config)), want)
    (place / "meta.json").unlink()
    _assert_equal(next(_build(config)), want)
    assert [path.name for path in (cache / "corpora").iterdir()] == [place.name]


def test_cache_that_cannot_be_written_is_named(write, cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="set PAXLIKE_CACHE to a folder"):
        _build(DataConfig(source=write("jsonl")))


def test_processes_may_fill_one_cache_at_a_time(write, texts):
    source = write("jsonl", [f"{text} {i}" for i in range(30) for text in texts])
    code = (
        "import sys\n"
        "from paxlike.data.config import SourceConfig\n"
        "from paxlike.data.corpus import load_corpus\n"
        "from paxlike.data.tokenizers import ByteTokenizer\n"
        "source = SourceConfig(kind='jsonl', paths=tuple(sys.argv[1:]), text_field='body')\n"
        "corpus = load_corpus(source, ByteTokenizer(), split='train', eval_fraction=0.1)\n"
        "print(int(corpus.tokens.sum(dtype='int64')))\n"
    )
    command = [sys.executable, "-c", code, *source.paths]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1
