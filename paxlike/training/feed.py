"""From a host's rows to a batch on the devices.

Each process reads just the rows that its devices hold, if these are a block like every other
process's; else (the batch is not split over processes) it reads them all. Nothing is exchanged.
"""

import jax
import numpy as np

from paxlike.config import Experiment
from paxlike.training.step import Batch, abstract_batch

_ALL = (slice(None), slice(None))


class Feed:
    """Puts batches on the devices of the active parallelism.

    Attributes:
        num_hosts: parts into which the global batch is read.
        host_index: which of them this process reads.
    """

    def __init__(self, experiment: Experiment) -> None:
        abstract = abstract_batch(experiment)
        self._shape = abstract["tokens"].shape
        self._sharding = abstract["tokens"].sharding
        rows = self._shape[0]
        slices = self._sharding.addressable_devices_indices_map(self._shape).values()
        starts, stops, _ = zip(*((s or _ALL)[0].indices(rows) for s in slices), strict=True)
        self._first, count = min(starts), max(stops) - min(starts)
        if rows % count or self._first % count:
            self._first, count = 0, rows
        self.num_hosts, self.host_index = rows // count, self._first // count

    def __call__(self, batch: dict[str, np.ndarray]) -> Batch:
        """Put this host's rows on its devices."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self._sharding)

        def place(rows: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                of_rows, of_tokens = index or _ALL
                start, stop, _ = of_rows.indices(self._shape[0])
                return rows[start - self._first : stop - self._first, of_tokens]

            return jax.make_array_from_callback(self._shape, self._sharding, part)

        return {name: place(rows) for name, rows in batch.items()}
