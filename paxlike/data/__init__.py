"""Text to batches: sources, tokenizers, packing, and batches whose position is a few integers."""
