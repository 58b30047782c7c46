"""Tiny random models with both image and audio input, for tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4AudioFeatureExtractor,
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from vision_models import FABLE, FIRST, UnifiedReady, made
from vision_models import TEXT as WRITER

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
    """A Gemma 4 with the audio encoder described by `ears`, saved in `folder` with both processors and a template for both."""
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
    """A Gemma 4 without separate encoders, saved in `folder`."""
    text = {key: value for key, value in TEXT.items() if "per_layer" not in key} | {"model_type": "gemma4_unified_text"}
    model = made("gemma4_unified", folder, text, {"patch_size": 4, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 70}, WORDS,
                 image_token_id=FIRST, boi_token_id=FIRST + 1, eoi_token_id=FIRST + 2, audio_config={"audio_embed_dim": 64},
                 audio_token_id=AUDIO, boa_token_id=FIRST + 4, eoa_token_id=FIRST + 5)
    UnifiedReady().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": 64, "sampling_rate": 16_000}}))
    return model


OMNI_WORDS = ["<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|VIDEO|>"]
OMNI_TEMPLATE = TEMPLATE.replace("'<|' + p['type'] + '|>'", "{'image': '<|vision_bos|><|IMAGE|><|vision_eos|>', "
                                 "'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>'}[p['type']]")
OMNI_EXTRACTOR = WhisperFeatureExtractor(feature_size=16, chunk_length=4)
OMNI_LOOKED = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=64 * 64)


def written_omni(folder: Path, extractor: WhisperFeatureExtractor = OMNI_EXTRACTOR, **own: object) -> PreTrainedModel:
    """The text model, vision and audio encoders of a Qwen 2.5 Omni, under the published tensor names. Windows of 40 frames, unless the
    audio encoder has its `own` sizes."""
    text = {**WRITER, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 4, 5]}}
    eyes = {"depth": 2, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": WRITER["hidden_size"]}
    ears = {"num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
            "max_source_positions": 30, "n_window": 20, "output_dim": WRITER["hidden_size"], **own}
    config = Qwen2_5OmniThinkerConfig(
        text_config=text, vision_config=eyes, audio_config=ears, image_token_index=FIRST, audio_token_index=AUDIO,
        video_token_index=FIRST + 6, vision_start_token_id=FIRST + 1, vision_end_token_id=FIRST + 2, audio_start_token_id=FIRST + 4,
        audio_end_token_id=FIRST + 5)
    torch.manual_seed(3)
    model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    published(folder, model, "qwen2_5_omni", OMNI_WORDS, OMNI_TEMPLATE, {**OMNI_LOOKED.to_dict(), **extractor.to_dict()})
    return model


def published(folder: Path, model: PreTrainedModel, kind: str, words: Sequence[str], template: str, ready: Mapping[str, object]) -> None:
    """The text model of a model with speech output, saved as the whole is published; `ready`: the preprocessing of images and audio."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({f"thinker.{name.replace('model.language_model.', 'model.')}": each for name, each in stored.items()},
              folder / "model.safetensors", {"format": "pt"})
    inner = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": kind, "dtype": "float32", "thinker_config": inner}
    (folder / "config.json").write_text(json.dumps({**whole, "talker_config": {}, "enable_audio_output": True}))
    ready = {key: each for key, each in ready.items() if isinstance(each, int | float | str | list | dict | None)}
    (folder / "preprocessor_config.json").write_text(json.dumps(ready))
    (folder / "generation_config.json").write_text((FABLE / "generation_config.json").read_text())
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    like = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**like, "id": FIRST + at, "content": word, "special": True} for at, word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


LATER_WORDS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<|video_pad|>"]
LATER_TEMPLATE = TEMPLATE.replace("'<|' + p['type'] + '|>'", "{'image': '<|vision_start|><|image_pad|><|vision_end|>', "
                                  "'audio': '<|audio_start|><|audio_pad|><|audio_end|>'}[p['type']]")
LATER_EXTRACTOR = WhisperFeatureExtractor(feature_size=16)


def written_later_omni(folder: Path, **own: object) -> PreTrainedModel:
    """As `written_omni`, of Qwen 3 Omni; every two of its one-second windows attend to each other."""
    text = {**WRITER, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4],
                                          "mrope_interleaved": True},
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    eyes = {"depth": 2, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 4, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0], "out_hidden_size": WRITER["hidden_size"]}
    ears = {"num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
            "max_source_positions": 30, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6,
            "output_dim": WRITER["hidden_size"], **own}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=eyes, audio_config=ears, image_token_id=FIRST, audio_token_id=AUDIO, video_token_id=FIRST + 6,
        vision_start_token_id=FIRST + 1, vision_end_token_id=FIRST + 2, audio_start_token_id=FIRST + 4, audio_end_token_id=FIRST + 5)
    torch.manual_seed(3)
    model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    published(folder, model, "qwen3_omni_moe", LATER_WORDS, LATER_TEMPLATE, {**OMNI_LOOKED.to_dict(), **LATER_EXTRACTOR.to_dict()})
    return model
