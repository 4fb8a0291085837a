"""ZeRO: parameters, gradients and optimizer state divided over the ranks that hold the same parameters."""
