"""The training loop and what it stands on: steps, state, checkpoints, metrics."""
