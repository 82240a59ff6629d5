"""What is timed: ratios within one run, medians of repeats. Run by `make bench`, never by the tests."""
