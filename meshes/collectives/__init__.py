"""Hand-written collectives: what a sharded computation exchanges, spelled out."""
