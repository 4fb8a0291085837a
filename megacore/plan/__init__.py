"""What a run needs, computed from its configuration alone: no torch, no tensors, the same answer on any machine."""
