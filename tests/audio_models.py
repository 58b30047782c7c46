"""Tiny random models with audio input for tests: transformers' feature extractors and encoders are the oracle."""

import io
import json
import shutil
import wave
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank
from vision_models import FABLE, FIRST, TEXT

from effllm.runtime.config import read_config
from effllm.runtime.images import MediaEncoder, encoder_of
from effllm.runtime.images.modality import AUDIO_INPUT, SAMPLE_RATE

# These encoders take one second at a time: 100 frames, 50 rows.
TOWER = {"num_mel_bins": 16, "num_hidden_layers": 3, "num_attention_heads": 3, "hidden_size": 48, "intermediate_size": 96,
         "max_source_positions": 50}
ENCODER_KEYS = {"num_hidden_layers": "encoder_layers", "num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model",
                "intermediate_size": "encoder_ffn_dim"}
EXTRACTOR = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
EXTRACTORS = {"glmasr": WhisperFeatureExtractor(feature_size=16, chunk_length=2)}  # it stacks four rows
TEMPLATE = ("{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
            "{{ 'PLACE' if p['type'] == 'audio' else p['text'] }}{% endfor %}{% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")
# Family -> (model_type of the text model, placeholder token and those around it, other fields of the config).
FAMILIES = {"qwen2_audio": ("qwen2", ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"), {"audio_token_index": FIRST}),
            "audioflamingo3": ("qwen2", ("<sound>",), {"audio_token_id": FIRST}),
            "glmasr": ("llama", ("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"), {"audio_token_id": FIRST}),
            "granite_speech": ("granite", ("<|audio|>",), {"audio_token_index": FIRST, "has_lora_adapter": False}),
            "voxtral": ("llama", ("[AUDIO]", "[BEGIN_AUDIO]"), {"audio_token_id": FIRST})}
# Granite Speech. A clip of 1.5 seconds exceeds one block of rows that attend to each other.
CONFORMER = {"input_dim": 32, "num_layers": 4, "hidden_dim": 48, "num_heads": 3, "output_dim": 11, "context_size": 20, "max_pos_emb": 24,
             "conv_kernel_size": 5}
QFORMER = {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
           "encoder_hidden_size": 48}
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
GRANITE_PROCESSOR = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "sampling_rate": SAMPLE_RATE, "projector_window_size": 15,
                     "projector_downsample_rate": 5,
                     "melspec_kwargs": {"hop_length": 160, "n_fft": 512, "n_mels": 16, "sample_rate": SAMPLE_RATE,
                                                                        "win_length": 400}}


def sound(seconds: float, seed: int = 1, rate: int = SAMPLE_RATE) -> np.ndarray:
    """float32 [samples]: tones that come and go, plus noise."""
    rng, t = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * (170 * (seed + harmonic) * t + 3 * np.sin(2 * harmonic * t))) for harmonic in range(1, 5))
    return (0.1 * tones * (1 + np.sin(5 * t)) + rng.normal(0, 0.01, len(t))).astype(np.float32).clip(-1, 1)


def as_wav(samples: np.ndarray, rate: int = SAMPLE_RATE) -> bytes:
    """16-bit PCM."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def save_audio_model(family: str, folder: Path, **changes: object) -> PreTrainedModel:
    """A random model saved in `folder` with the packaged tokenizer plus the family's special tokens; returns transformers' model."""
    text, words, family_config = FAMILIES[family]
    tower = {ENCODER_KEYS.get(key, key) if family == "qwen2_audio" else key: value for key, value in TOWER.items()}
    if family == "glmasr":
        tower |= {"intermediate_size": 4 * tower["hidden_size"], "max_position_embeddings": 2 * tower.pop("max_source_positions")}
    configs = {"text_config": {**deepcopy(TEXT), "model_type": text}, "audio_config": {**tower, "model_type": f"{family}_encoder"}}
    if family == "granite_speech":
        configs = {"text_config": configs["text_config"] | MULTIPLIERS, "encoder_config": CONFORMER, "projector_config": QFORMER}
    config = AutoConfig.for_model(family, **configs, **{**family_config, **changes})
    torch.manual_seed(3)
    model_class = _class(family)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
        for name, buffer in model.named_buffers():  # batch norm statistics
            if "running_" in name:
                buffer.add_(torch.rand_like(buffer))
    model.save_pretrained(folder)
    if family == "granite_speech":
        (folder / "preprocessor_config.json").write_text(json.dumps(GRANITE_PROCESSOR))
    else:
        EXTRACTORS.get(family, EXTRACTOR).save_pretrained(folder)
    shutil.copy(FABLE / "generation_config.json", folder / "generation_config.json")
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE.replace("PLACE", "".join(
        sorted(words, key=lambda word: ("BEGIN" in word or "bos" in word, "eos" not in word), reverse=True)))}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    added_token = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**added_token, "id": FIRST + number, "content": word, "special": True} for number,
                                   word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _class(family: str) -> type[PreTrainedModel]:
    import transformers

    names = {"qwen2_audio": "Qwen2Audio", "audioflamingo3": "AudioFlamingo3", "granite_speech": "GraniteSpeech", "voxtral": "Voxtral",
             "glmasr": "GlmAsr"}
    return getattr(transformers, f"{names[family]}ForConditionalGeneration")


def open_encoder(folder: Path) -> MediaEncoder:
    return encoder_of(folder, read_config(folder), AUDIO_INPUT)


def processor_output(family: str, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
    """A transformers processor's output for an audio clip, as input of its model."""
    if family == "voxtral":
        output = EXTRACTOR(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt", padding=True, truncation=False,
                           pad_to_multiple_of=SAMPLE_RATE)
        features = output["input_features"].reshape(16, -1, 100).transpose(0, 1)
        return {"input_features": features}
    if family == "granite_speech":
        return {"input_features": granite_features(samples)}
    extractor = EXTRACTORS.get(family, EXTRACTOR)
    windows = [samples[begin : begin + extractor.n_samples] for begin in range(0, len(samples), extractor.n_samples)]
    output = extractor(windows, sampling_rate=SAMPLE_RATE, return_tensors="pt", padding="max_length", return_attention_mask=True)
    mask = "feature_attention_mask" if family == "qwen2_audio" else "input_features_mask"
    return {"input_features": output["input_features"], mask: output["attention_mask"]}


def granite_features(samples: np.ndarray) -> torch.Tensor:
    """Output of Granite Speech's feature extractor for an audio clip [1, pairs, 32], by torch's own transform: its own needs torchaudio."""
    spectrum = torch.stft(torch.from_numpy(samples), 512, 160, 400, torch.hann_window(400), return_complex=True)
    filters = mel_filter_bank(257, 16, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm=None, mel_scale="htk")
    mel = (spectrum.abs().square().T @ torch.from_numpy(filters).float()).clip(min=1e-10).log10()
    mel = torch.maximum(mel, mel.max() - 8) / 4 + 1
    return mel[: len(mel) // 2 * 2].reshape(1, -1, 32)
