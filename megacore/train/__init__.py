"""The training loop and what surrounds it: launch, logs, and the watch over the other ranks."""
