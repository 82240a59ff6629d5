"""Transformer layers: NNX modules and pure array functions that know logical names only."""
