"""Models as lists of layers, so that a pipeline stage builds only its own."""
