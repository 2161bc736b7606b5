"""A run on disk: checkpoints, metrics, results."""
