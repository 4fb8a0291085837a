"""Text to batches: tokenizers, the .bin/.idx format, GPT samples, blends and the loader.

The way of one token: `preprocess` (text -> .bin/.idx) -> `indexed` (opens and checks them) -> `gpt` (which tokens make
sample k) -> `blend` (which dataset sample k comes from) -> `loader` (which samples this rank gets at this step).
Only `loader` imports torch; everything else is NumPy, so that inputs are checked before torch is loaded.
"""
