"""Checkpoints of other libraries, both ways; needs `pip install gla-layers[convert]`.

    model = load_pretrained(path)                 a folder with config.json and safetensors
    save_pretrained(model, path)                  as flash-linear-attention writes it
    save_pretrained(model, path, like=original)   as the checkpoint that it came from

Read and written by `model_type`: "gated_deltanet", "kda" and "simple_gla" of
flash-linear-attention, hybrids with attention among them. Every tensor must be used and every
parameter filled, or an error names those that are not.
"""

from .pretrained import layer_from_tensors, layer_to_tensors, load_pretrained, save_pretrained

__all__ = ["layer_from_tensors", "layer_to_tensors", "load_pretrained", "save_pretrained"]
