"""Phi 4 multimodal, text part: Phi 3; vision and audio are left out.

The first checkpoints (`phi4mm`) have LoRA adapters for images and speech beside each matrix, which is named base_layer there. Text needs no
adapter.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import Keys
from . import phi3

LIKE = phi3
# The encoders of images and audio, and their adapters.
KEYS_HARMLESS = phi3.KEYS_HARMLESS | {"audio_config", "audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_config",
                                      "vision_lora"}
SIZES = {"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32}
CODE = r"(configuration|modeling)_phi4mm\.Phi4MM\w+"  # auto_map of the published checkpoint; part of transformers now


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=8, bos=199_999, eos=(199_999, 200_020), norm_eps=1e-5, sizes=SIZES)
    return phi3.phi3_config(keys, base, CODE)
