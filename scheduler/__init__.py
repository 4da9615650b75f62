"""Plans rounds over integers. Knows nothing about tensors."""
