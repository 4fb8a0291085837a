"""Checkpoints: directories of safetensors shards and a manifest, published whole or not at all, readable on any
layout."""
