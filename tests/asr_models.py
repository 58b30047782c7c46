"""A tiny random Qwen3-ASR model for tests, in both layouts in which such models are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from vision_models import FABLE, FIRST
from vision_models import TEXT as WRITER

EXTRACTOR = Qwen3ASRFeatureExtractor(feature_size=16)
WORDS = ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<asr_text>"]
# Windows of a second, of which two attend to each other.
AUDIO_TOWER = {"num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96, "n_window": 50,
               "n_window_infer": 200, "downsample_hidden_size": 6, "output_dim": WRITER["hidden_size"], "max_position_embeddings": 13}
# User text is omitted, as in the published template; only audio is rendered.
TEMPLATE = ("{% for m in messages if m['role'] == 'system' %}system: "
            "{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}\n{% endfor %}"
            "user: {% for m in messages if m['content'] is not string %}{% for p in m['content'] if p['type'] == 'audio' %}"
            "<|audio_start|><|audio_pad|><|audio_end|>{% endfor %}{% endfor %}\n{% if add_generation_prompt %}assistant: {% endif %}")


def save_asr_model(folder: Path, as_first_published: bool = False, **audio_changes: object) -> PreTrainedModel:
    """Save a random model; returns transformers' model.

    as_first_published: use the layout of the first release instead of that of transformers.
    audio_changes: fields of `audio_config` that differ from AUDIO_TOWER.
    """
    config = Qwen3ASRConfig(text_config={**WRITER, "model_type": "qwen3"}, audio_config={**AUDIO_TOWER, **audio_changes},
                            audio_token_id=FIRST,
                            pad_token_id=0, eos_token_id=1)
    torch.manual_seed(3)
    model = Qwen3ASRForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    model.save_pretrained(folder)
    processor_config = {key: value for key,
                        value in EXTRACTOR.to_dict().items() if isinstance(value, int | float | str | list | dict | None)}
    if as_first_published:
        _rewrite_as_first_published(folder)
        processor_config = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "n_fft": 400, "hop_length": 160,
                            "dither": 0.0}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor_config))
    else:
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3ASRProcessor",
                                                                  "feature_extractor": processor_config}))
    (folder / "generation_config.json").write_text((FABLE / "generation_config.json").read_text())
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    added_token = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**added_token, "id": FIRST + index, "content": word, "special": word != "<asr_text>"}
                                   for index, word in enumerate(WORDS)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return model


def _rewrite_as_first_published(folder: Path) -> None:
    stored, tensors = load_file(folder / "model.safetensors"), {}
    for name, value in stored.items():
        old_name = name.removeprefix("model.").replace("multi_modal_projector.linear_", "audio_tower.proj").replace("language_model.",
                                                                                                                    "model.")
        tensors[f"thinker.{old_name}"] = value
    tensors["thinker.lm_head.weight"] = tensors["thinker.model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] | {"rope_scaling": {"mrope_interleaved": True, "interleaved": True, "mrope_section": [4, 4, 4],
                                                  "rope_type": "default", "type": "default"}}
    text = {key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")} | {
        "rope_theta": raw["text_config"]["rope_parameters"]["rope_theta"], "tie_word_embeddings": True}
    audio = raw["audio_config"] | {"model_type": "qwen3_asr_audio_encoder", "max_source_positions": 1500, "conv_chunksize": 500}
    thinker = {"audio_config": audio, "text_config": text, "audio_token_id": FIRST, "model_type": "qwen3_asr_thinker"}
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", "dtype": "float32",
        "support_languages": ["English"], "thinker_config": thinker}))
