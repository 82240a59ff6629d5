"""Experiments: base language models in `lm`, and one folder for each paper."""
