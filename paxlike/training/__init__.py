"""Training: optimizers, state, the compiled step and the loop around it."""
