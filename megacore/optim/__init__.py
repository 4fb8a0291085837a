"""From gradients to updated weights: reduction over data-parallel ranks, clipping, learning rate, optimizer."""
