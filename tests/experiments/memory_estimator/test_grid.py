"""The grid of layouts: its bookkeeping, and one cell compiled."""

from experiments.memory_estimator.grid import (
    Measured,
    confusion,
    estimate_of,
    layouts,
    measure,
    rank_correlation,
)
from paxlike.analysis.memory_model import Estimate


def cell(estimated: int, peak: int) -> Measured:
    estimate = Estimate(
        params=estimated, grads=0, optimizer=0, activations=0, logits=0, buffers=0
    )  # fmt: skip
    return Measured(name="", estimate=estimate, peak_bytes=peak, temporary_bytes=peak)


def test_confusion():
    rows = [cell(80, 90), cell(80, 101), cell(81, 100), cell(101, 120)]
    assert confusion(rows, 100) == {
        ("safe", True): 1, ("safe", False): 1, ("try", True): 1, ("no", False): 1,
    }  # fmt: skip


def test_rank_correlation():
    assert rank_correlation([cell(1, 10), cell(2, 11), cell(3, 900)]) == 1
    assert rank_correlation([cell(1, 12), cell(2, 11), cell(3, 10)]) == -1


def test_grid_has_different_layouts_with_estimates():
    every = list(layouts())
    assert len({experiment.name for experiment in every}) == len(every) == 24
    assert all(estimate_of(experiment).total > 0 for experiment in every)


def test_a_compiled_layout_needs_what_is_counted():
    """Parameters and moments are arguments, exactly; the rest is at least the activations."""
    row = measure(next(layouts()))
    states = row.estimate.params + row.estimate.optimizer
    assert 0 < row.peak_bytes - row.temporary_bytes - states < 10_000
    assert row.temporary_bytes > row.estimate.activations
