"""What a compiled program does, read from its optimised HLO: collectives, FLOPs, bytes."""
