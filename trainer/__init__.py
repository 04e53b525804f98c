"""Training: data sets, networks, losses, the loop, checkpoints."""
