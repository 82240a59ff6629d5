"""Rows of tokens cut from a stream of documents.

A row is a window of a token stream, so it can be made from its index alone: no packing decision
depends on the rows before it, which is what makes resume exact. Documents that share a row are told
apart by their segment id; positions count from the document's first token in the row.

Dims: B rows, T tokens of a row, U documents.
"""

import numpy as np

Batch = dict[str, np.ndarray]


class Packed:
    """The stream cut every T tokens, whatever document it is in; only the last row has padding."""

    def __init__(self, offsets_U: np.ndarray, sequence_length: int) -> None:
        self._length = sequence_length
        self._total = int(offsets_U[-1])
        self.num_rows = -(-self._total // sequence_length)

    def window(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token of each row, and the one it must stay before; none beyond the last row."""
        return rows * self._length, np.full_like(rows, self._total)


class Padded:
    """Each document from the start of a row, going on in further rows where it is longer than T."""

    def __init__(self, offsets_U: np.ndarray, sequence_length: int) -> None:
        self._length = sequence_length
        self._offsets_U = offsets_U
        rows_of_document = -(-np.diff(offsets_U) // sequence_length)
        self._first_row_U = np.concatenate([[0], np.cumsum(rows_of_document)])
        self.num_rows = int(self._first_row_U[-1])

    def window(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token of each row, and the one it must stay before; none beyond the last row."""
        document = np.searchsorted(self._first_row_U, rows, "right") - 1
        document = np.minimum(document, len(self._offsets_U) - 2)
        within = (rows - self._first_row_U[document]) * self._length
        return self._offsets_U[document] + within, self._offsets_U[document + 1]


def cut(
    tokens: np.ndarray,
    offsets_U: np.ndarray,
    starts_B: np.ndarray,
    limits_B: np.ndarray,
    sequence_length: int,
    pad_id: int,
) -> Batch:
    """Makes rows from windows of a token stream.

    Args:
        tokens: [total] the documents' tokens, one after another.
        offsets_U: [U + 1] where each document begins in `tokens`, and the total; ascending.
        starts_B: [B] first token of each row.
        limits_B: [B] the row takes no token from here on; a start at or beyond gives an empty row.
        sequence_length: T.
        pad_id: token where there is none.

    Returns:
        `tokens` and `targets` int32 [B, T]; `segment_ids` int32 [B, T], 0 where padded, else 1, 2,
        ... in the row; `positions` int32 [B, T], from 0 in each segment; `loss_weights` float32
        [B, T], 1 where the target is the document's next token (which may lie in the next row),
        else 0.
    """
    at_BT = starts_B[:, None] + np.arange(sequence_length + 1)
    valid_BT = at_BT < limits_B[:, None]
    at_BT = np.where(valid_BT, at_BT, 0)
    tokens_BT = np.where(valid_BT, tokens[at_BT], pad_id).astype(np.int32)
    document_BT = np.searchsorted(offsets_U, at_BT, "right") - 1
    same_BT = valid_BT[:, 1:] & (document_BT[:, 1:] == document_BT[:, :-1])
    segment_BT = np.where(valid_BT, document_BT - document_BT[:, :1] + 1, 0)[:, :-1]
    begin_BT = np.maximum(offsets_U[document_BT], starts_B[:, None])
    position_BT = np.where(valid_BT, at_BT - begin_BT, 0)[:, :-1]
    return {
        "tokens": np.ascontiguousarray(tokens_BT[:, :-1]),
        "targets": np.where(same_BT, tokens_BT[:, 1:], pad_id).astype(np.int32),
        "segment_ids": segment_BT.astype(np.int32),
        "positions": position_BT.astype(np.int32),
        "loss_weights": same_BT.astype(np.float32),
    }
