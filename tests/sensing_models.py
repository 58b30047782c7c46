"""Tiny random models that see and hear, for tests."""

import json
from pathlib import Path

import numpy as np
from sight_models import FIRST, UnifiedReady, made
from transformers import Gemma4AudioFeatureExtractor, PreTrainedModel
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

WORDS = ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
AUDIO = FIRST + 3
EYES = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 24, "patch_size": 4, "position_embedding_size": 220}
# Blocks of 4 rows, of which each sees itself and 4 before.
EARS = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [16, 6], "output_proj_dims": 40,
        "attention_chunk_size": 4, "attention_context_left": 5, "use_clipped_linears": False}
TEXT = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100, "global_head_dim": 32,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4200, "num_kv_shared_layers": 0}
TEMPLATE = ("{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
            "{{ p['text'] if p['type'] == 'text' else '<|' + p['type'] + '|>' }}{% endfor %}{% endif %}"
            "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
EXTRACTOR, LOOKED = Gemma4AudioFeatureExtractor(feature_size=16), Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)


def written_gemma4(folder: Path, **ears: object) -> PreTrainedModel:
    """A Gemma 4 whose tower of sounds is as `ears` say, saved in `folder` with both processors and a template that knows of both."""
    model = made("gemma4", folder, TEXT, EYES, WORDS, image_token_id=FIRST, boi_token_id=FIRST + 1, eoi_token_id=FIRST + 2,
                 audio_config={**EARS, **ears}, audio_token_id=AUDIO, boa_token_id=FIRST + 4, eoa_token_id=FIRST + 5)
    for name, each in model.model.audio_tower.named_buffers():
        if name.endswith(("_min", "_max")):
            each.fill_(-1.5 if name.endswith("_min") else 1.0)
    model.save_pretrained(folder)
    parts = {"image_processor": LOOKED.to_dict(),
             "feature_extractor": EXTRACTOR.to_dict()}
    plain = {key: {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in part.items()}
             for key, part in parts.items()}
    (folder / "processor_config.json").write_text(json.dumps(plain))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def written_unified(folder: Path) -> PreTrainedModel:
    """A Gemma 4 without towers, saved in `folder`."""
    text = {key: value for key, value in TEXT.items() if "per_layer" not in key} | {"model_type": "gemma4_unified_text"}
    model = made("gemma4_unified", folder, text, {"patch_size": 4, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 70}, WORDS,
                 image_token_id=FIRST, boi_token_id=FIRST + 1, eoi_token_id=FIRST + 2, audio_config={"audio_embed_dim": 64},
                 audio_token_id=AUDIO, boa_token_id=FIRST + 4, eoa_token_id=FIRST + 5)
    UnifiedReady().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": 64, "sampling_rate": 16_000}}))
    return model
