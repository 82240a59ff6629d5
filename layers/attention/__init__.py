"""Attention: one local core, schemes over a split sequence, and the layer that calls them."""
