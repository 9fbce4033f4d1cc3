"""The shipped pair: its corpus, its training and its model card."""
