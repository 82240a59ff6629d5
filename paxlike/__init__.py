"""What runs an experiment: configuration, data, training, checkpoints, inference, analysis."""
