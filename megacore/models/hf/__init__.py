"""The model families of Hugging Face transformers that megacore can read and write: tables of configuration fields and
of tensors, one file a family group. Nothing here imports torch or transformers."""
