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
from vision_models import FABLE, FIRST, Gemma4UnifiedProcessor, save_random_model
from vision_models import TEXT as WRITER

WORDS = ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
AUDIO = FIRST + 3
VISION_TOWER = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
                "head_dim": 24, "patch_size": 4, "position_embedding_size": 220}
# Blocks of 4 rows, of which each sees itself and 4 before.
AUDIO_TOWER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [16, 6],
               "output_proj_dims": 40,
               "attention_chunk_size": 4, "attention_context_left": 5, "use_clipped_linears": False}
TEXT = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100, "global_head_dim": 32,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4200, "num_kv_shared_layers": 0}
TEMPLATE = ("{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
            "{{ p['text'] if p['type'] == 'text' else '<|' + p['type'] + '|>' }}{% endfor %}{% endif %}"
            "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
EXTRACTOR, IMAGE_PROCESSOR = Gemma4AudioFeatureExtractor(feature_size=16), Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)


def save_gemma4(folder: Path, **audio_changes: object) -> PreTrainedModel:
    """A Gemma 4 with image and audio input, saved in `folder` with both processors and a chat template.

    audio_changes: fields of `audio_config` that differ from AUDIO_TOWER.
    """
    model = save_random_model("gemma4", folder, TEXT, VISION_TOWER, WORDS, image_token_id=FIRST, boi_token_id=FIRST + 1,
                              eoi_token_id=FIRST + 2,
                              audio_config={**AUDIO_TOWER, **audio_changes}, audio_token_id=AUDIO, boa_token_id=FIRST + 4,
                              eoa_token_id=FIRST + 5)
    for name, buffer in model.model.audio_tower.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-1.5 if name.endswith("_min") else 1.0)
    model.save_pretrained(folder)
    parts = {"image_processor": IMAGE_PROCESSOR.to_dict(),
             "feature_extractor": EXTRACTOR.to_dict()}
    serializable = {key: {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in section.items()}
                    for key, section in parts.items()}
    (folder / "processor_config.json").write_text(json.dumps(serializable))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def save_gemma4_unified(folder: Path) -> PreTrainedModel:
    """A Gemma 4 without separate encoders, saved in `folder`."""
    text = {key: value for key, value in TEXT.items() if "per_layer" not in key} | {"model_type": "gemma4_unified_text"}
    model = save_random_model("gemma4_unified", folder, text,
                              {"patch_size": 4, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 70}, WORDS,
                              image_token_id=FIRST, boi_token_id=FIRST + 1, eoi_token_id=FIRST + 2, audio_config={"audio_embed_dim": 64},
                              audio_token_id=AUDIO, boa_token_id=FIRST + 4, eoa_token_id=FIRST + 5)
    Gemma4UnifiedProcessor().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": 64, "sampling_rate": 16_000}}))
    return model


OMNI_WORDS = ["<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|VIDEO|>"]
OMNI_TEMPLATE = TEMPLATE.replace("'<|' + p['type'] + '|>'", "{'image': '<|vision_bos|><|IMAGE|><|vision_eos|>', "
                                 "'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>'}[p['type']]")
OMNI_EXTRACTOR = WhisperFeatureExtractor(feature_size=16, chunk_length=4)
OMNI_IMAGE_PROCESSOR = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=64 * 64)


def save_qwen2_5_omni(folder: Path, extractor: WhisperFeatureExtractor = OMNI_EXTRACTOR, **audio_changes: object) -> PreTrainedModel:
    """The text model, vision and audio encoders of a Qwen 2.5 Omni, under the published tensor names.

    audio_changes: fields of `audio_config` that differ from the default, whose windows have 40 frames.
    """
    text = {**WRITER, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 4, 5]}}
    vision = {"depth": 2, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 4, "window_size": 16,
              "fullatt_block_indexes": [1], "out_hidden_size": WRITER["hidden_size"]}
    audio = {"num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
             "max_source_positions": 30, "n_window": 20, "output_dim": WRITER["hidden_size"], **audio_changes}
    config = Qwen2_5OmniThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, image_token_index=FIRST, audio_token_index=AUDIO,
        video_token_index=FIRST + 6, vision_start_token_id=FIRST + 1, vision_end_token_id=FIRST + 2, audio_start_token_id=FIRST + 4,
        audio_end_token_id=FIRST + 5)
    torch.manual_seed(3)
    model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    save_as_published(folder, model, "qwen2_5_omni", OMNI_WORDS, OMNI_TEMPLATE, {**OMNI_IMAGE_PROCESSOR.to_dict(), **extractor.to_dict()})
    return model


def save_as_published(folder: Path, model: PreTrainedModel, kind: str, words: Sequence[str], template: str,
                      processor_config: Mapping[str, object]) -> None:
    """Save the text model of a model with speech output as the whole model is published.

    processor_config: settings of the image and audio preprocessing.
    """
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({f"thinker.{name.replace('model.language_model.', 'model.')}": value for name, value in stored.items()},
              folder / "model.safetensors", {"format": "pt"})
    inner = json.loads((folder / "config.json").read_text())
    outer_config = {"architectures": ["Qwen2_5OmniModel"], "model_type": kind, "dtype": "float32", "thinker_config": inner}
    (folder / "config.json").write_text(json.dumps({**outer_config, "talker_config": {}, "enable_audio_output": True}))
    processor_config = {key: value for key, value in processor_config.items() if isinstance(value, int | float | str | list | dict | None)}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_config))
    (folder / "generation_config.json").write_text((FABLE / "generation_config.json").read_text())
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    added_token = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**added_token, "id": FIRST + index, "content": word, "special": True} for index,
                                   word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


QWEN3_OMNI_WORDS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>",
                    "<|video_pad|>"]
QWEN3_OMNI_TEMPLATE = TEMPLATE.replace("'<|' + p['type'] + '|>'", "{'image': '<|vision_start|><|image_pad|><|vision_end|>', "
                                       "'audio': '<|audio_start|><|audio_pad|><|audio_end|>'}[p['type']]")
QWEN3_OMNI_EXTRACTOR = WhisperFeatureExtractor(feature_size=16)


def save_qwen3_omni(folder: Path, **audio_changes: object) -> PreTrainedModel:
    """As `save_qwen2_5_omni`, for Qwen 3 Omni; every two of its one-second windows attend to each other."""
    text = {**WRITER, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4],
                                          "mrope_interleaved": True},
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    vision = {"depth": 2, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 4, "num_position_embeddings": 36,
              "deepstack_visual_indexes": [0], "out_hidden_size": WRITER["hidden_size"]}
    audio = {"num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
             "max_source_positions": 30, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6,
             "output_dim": WRITER["hidden_size"], **audio_changes}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, image_token_id=FIRST, audio_token_id=AUDIO, video_token_id=FIRST + 6,
        vision_start_token_id=FIRST + 1, vision_end_token_id=FIRST + 2, audio_start_token_id=FIRST + 4, audio_end_token_id=FIRST + 5)
    torch.manual_seed(3)
    model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    save_as_published(folder, model, "qwen3_omni_moe", QWEN3_OMNI_WORDS, QWEN3_OMNI_TEMPLATE,
                      {**OMNI_IMAGE_PROCESSOR.to_dict(), **QWEN3_OMNI_EXTRACTOR.to_dict()})
    return model
