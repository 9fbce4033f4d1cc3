"""Sources of weights: checkpoints, the shipped pair, random and synthetic pairs."""
