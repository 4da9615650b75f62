"""LFM2 language models on tinygrad."""
