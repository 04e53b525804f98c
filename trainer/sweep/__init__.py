"""Sweeps: train many settings with several seeds each, and compare them."""
