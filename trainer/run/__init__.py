"""A training run: the loop, its state, its folder and its scores."""
