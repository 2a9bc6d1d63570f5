"""Checkpoints of other libraries, both ways; needs `pip install gla-layers[convert]`.

Whole language models:

    model = load_pretrained(path)                 a folder with config.json and safetensors
    save_pretrained(model, path)                  as flash-linear-attention writes it
    save_pretrained(model, path, like=original)   as the checkpoint that it came from

Known by the `model_type` of their `config.json`: "gated_deltanet", "kda" and "simple_gla" of
flash-linear-attention, hybrids with attention among them; "qwen3_5", "qwen3_5_text", "qwen3_next",
"olmo_hybrid" and "kimi_linear", without mixtures of experts. Every tensor must be used and every
parameter filled, or an error names those that are not.
"""

from .pretrained import layer_from_tensors, layer_to_tensors, load_pretrained, save_pretrained

__all__ = ["layer_from_tensors", "layer_to_tensors", "load_pretrained", "save_pretrained"]
