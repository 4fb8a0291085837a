"""Tokenizers: reading, training, and the pieces of BERT's words."""
