"""Linear-attention layers in Flax NNX."""
