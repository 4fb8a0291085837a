"""Conversion between megacore's checkpoints, directories of Hugging Face transformers, and Megatron-LM's files."""
