"""What is timed: ratios within one run, medians of repeats; `make bench`, never the tests."""
