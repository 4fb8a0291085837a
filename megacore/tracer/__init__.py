"""A step that is not taken: the real program on fake tensors, and what it holds and launches."""
