"""Samples for causal language models: documents, shuffles, blends, and the cached index."""
