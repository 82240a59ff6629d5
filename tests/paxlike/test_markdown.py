"""Quantities are shown with the unit that their name tells."""

import pytest

from paxlike.markdown import readable


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("step_seconds", 2.5e-6, "2.5 us"),
        ("step_seconds", 61.5, "61.5 s"),
        ("total_bytes", 999, "999 B"),
        ("count", 1_000_000, "1,000,000"),
        ("loss", 2.123456, "2.1235"),
        ("hidden_fraction", 0.5, "50.0%"),
        ("fits", True, "True"),
        ("missing", None, ""),
    ],
)
def test_readable(name, value, shown):
    assert readable(name, value) == shown
