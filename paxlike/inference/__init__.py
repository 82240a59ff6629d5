"""Inference: sampling and generation with a key/value cache."""
