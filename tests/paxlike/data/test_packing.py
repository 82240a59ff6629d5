"""Rows against a reference that walks the documents token by token."""

import numpy as np
import pytest

from paxlike.data.packing import Packed, Padded, cut

PAD = 999


def reference_rows(documents, length, packing):
    """Rows as lists of (token, target, segment, position, weight)."""
    rows, row = [], []

    def flush():
        nonlocal row
        if row:
            rows.append(row + [(PAD, PAD, 0, 0, 0)] * (length - len(row)))
        row = []

    for document in documents:
        if packing == "pad":
            flush()
        position, segment = 0, (row[-1][2] + 1 if row else 1)
        for i, token in enumerate(document):
            if len(row) == length:
                flush()
                position, segment = 0, 1
            has_next = i + 1 < len(document)
            row.append((token, document[i + 1] if has_next else PAD, segment, position, has_next))
            position += 1
        if len(row) == length:
            flush()
    flush()
    return np.array(rows, np.int64)


def our_rows(documents, length, packing, extra=0):
    tokens = np.concatenate(documents).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
    layout = (Packed if packing == "pack" else Padded)(offsets, length)
    starts, limits = layout.window(np.arange(layout.num_rows + extra))
    return cut(tokens, offsets, starts, limits, length, PAD)


@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 64])
def test_rows_equal_the_reference(packing, length):
    generator = np.random.default_rng(length)
    for _ in range(30):
        sizes = generator.integers(1, 14, size=generator.integers(1, 12))
        documents = [generator.integers(0, 500, size=size) for size in sizes]
        want = reference_rows([d.tolist() for d in documents], length, packing)
        got = our_rows(documents, length, packing)
        for i, name in enumerate(("tokens", "targets", "segment_ids", "positions", "loss_weights")):
            np.testing.assert_array_equal(got[name], want[:, :, i], err_msg=name)


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_rows_beyond_the_last_are_empty(packing):
    documents = [np.arange(3), np.arange(9)]
    rows = our_rows(documents, 4, packing, extra=3)
    for name in ("segment_ids", "positions", "loss_weights"):
        assert not rows[name][-3:].any()
        assert rows[name][:-3].any() or name == "positions"


def test_types():
    rows = our_rows([np.arange(5)], 4, "pack")
    assert {name: values.dtype.name for name, values in rows.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "loss_weights": "float32",
    }


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_every_next_token_is_learnt_once(packing):
    documents = [np.arange(size) for size in (1, 7, 8, 9, 30)]
    rows = our_rows(documents, 8, packing)
    # All tokens but each document's first are a target.
    assert rows["loss_weights"].sum() == sum(len(d) - 1 for d in documents)
    assert (rows["segment_ids"] > 0).sum() == sum(len(d) for d in documents)
