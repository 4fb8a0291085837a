"""Models as lists of layers, so that a pipeline stage builds only the layers that it runs."""
