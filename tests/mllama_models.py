"""Tiny Llama 3.2 Vision models, and transformers' output for texts with images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from vision_models import FIRST, save_vision_model

# Layers of all places: the first, the last, and two behind each other.
TEXT = {"vocab_size": FIRST, "num_hidden_layers": 6, "cross_attention_layers": [0, 2, 3, 5], "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": 0}
TOWER = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 3, "image_size": 32,
         "patch_size": 4, "vision_output_dim": 3 * 48, "intermediate_layers_indices": [2, 0]}
PROCESSOR = MllamaImageProcessorPil(size={"height": 32, "width": 32}, max_image_tiles=4)


def mllama(folder: Path) -> PreTrainedModel:
    """One in `folder`, as transformers reads it."""
    return save_vision_model(folder, "mllama",
                             ({**TEXT, "model_type": "mllama_text_model"}, TOWER, ["<|image|>"], {"image_token_index": FIRST},
                                                PROCESSOR))


def told(ids: Sequence[int]) -> list[int]:
    """Ids with the image token in place of each image's own id."""
    return [FIRST if token >= 1 << 40 else token for token in ids]


def wanted(model: PreTrainedModel, ids: Sequence[int], points: Sequence[np.ndarray]) -> np.ndarray:
    """Logits [T, V] of ids with images of these pixels. What transformers lets tokens before the first image attend to (it gives them an
    even share of all) is removed, as in the originally published code."""
    ids = told(ids)
    if not points:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    ready = PROCESSOR([list(points)], input_data_format="channels_last", return_tensors="pt")
    tiles = ready.pop("num_tiles")
    mask = convert_sparse_cross_attention_mask_to_dense([get_cross_attention_token_mask(ids, FIRST)], tiles, 4, len(ids))
    sees = torch.tensor(mask.any(axis=(2, 3)), dtype=torch.float32)[..., None]
    hooks = [layer.cross_attn.register_forward_hook(lambda module, given, found: (found[0] * sees, *found[1:]))
             for layer in model.model.language_model.layers if hasattr(layer, "cross_attn")]
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), cross_attention_mask=torch.tensor(mask), **ready, use_cache=False).logits[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
