"""Translates the audio keys of an mmproj file to the checkpoint's config.json and preprocessor_config.json.

Files state little beyond sizes. What they leave implicit (windows, spectrogram parameters) is the same in all checkpoints of a family,
and counts are read off tensor shapes. The counterpart of `projector_config.py`; tensor names are in `audio_names.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ...offload.gguf_header import GgufHeader
from ...offload.safetensors_header import damaged
from ..config_reader import Keys
from .audio_names import POSITION_EMBD

HOP_LENGTH, SAMPLE_RATE = 160, 16_000  # samples between mel frames; samples per second
CONV_STRIDE = 2  # mel frames per encoder position
QFORMER_TENSOR = re.compile(r"a\.proj_blk\.([0-9]{1,4})\.(.+)")
JsonPair = tuple[Mapping[str, object], Mapping[str, object]]  # config.json and preprocessor_config.json
TowerConfig = Mapping[str, object]  # sizes of the encoder, by their config.json keys


def require_shape(header: GgufHeader, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """The shape of a tensor. Raises CheckpointError if it is missing or has another number of dimensions."""
    tensor = header.tensors.get(name)
    if tensor is None:
        damaged(header.path, f"holds no tensor {name}")
    if len(tensor.shape) != dimensions:
        damaged(header.path, f"has tensor {name} of {len(tensor.shape)} dimensions, not {dimensions}")
    return tensor.shape


def whisper_extractor(tower: TowerConfig, seconds: int) -> dict[str, object]:
    """The preprocessor_config.json of Whisper's feature extractor."""
    return {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": tower["num_mel_bins"], "hop_length": HOP_LENGTH,
            "chunk_length": seconds}


def _whisper(model_type: str) -> Callable[..., JsonPair]:
    """A builder for families with a Whisper encoder, which has a learned position for every row of a window."""
    def build(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
        num_positions = require_shape(header, POSITION_EMBD)[0]
        seconds, remainder = divmod(num_positions * CONV_STRIDE * HOP_LENGTH, SAMPLE_RATE)
        if remainder or not seconds:
            damaged(header.path, f"has {num_positions} places for rows of a window, which are not whole seconds")
        stacked = {} if model_type != "voxtral" else {"intermediate_size": keys.integer("projector.stack_factor", 4, high=1 << 10)
                                                      * keys.integer("embedding_length", high=1 << 16)}
        if stacked and stacked["intermediate_size"] != tower["intermediate_size"]:
            damaged(header.path, f"joins rows to {stacked['intermediate_size']} numbers, but its layers widen them to "
                                 f"{tower['intermediate_size']}")
        return {"model_type": model_type,
                "audio_config": {"model_type": ENCODER_TYPES[model_type], **tower, "max_source_positions": num_positions}}, \
            whisper_extractor(tower, seconds)

    return build


# Model type -> model type of its audio_config.
ENCODER_TYPES = {"audioflamingo3": "audioflamingo3_encoder", "qwen2_audio": "qwen2_audio_encoder", "voxtral": "voxtral_encoder"}


def _qwen2_5_omni(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
    config = {"model_type": "qwen2_5_omni", "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", **tower}}
    return config, whisper_extractor(tower, 300)


def _qwen3_audio(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
    """Qwen3 Omni for a mixture-of-experts text model, else Qwen3-ASR."""
    model = "qwen3_omni_moe" if text == "qwen3vlmoe" else "qwen3_asr"
    encoder = "qwen3_omni_moe_audio_encoder" if text == "qwen3vlmoe" else "qwen3_asr_audio_encoder"
    channels = require_shape(header, "a.conv2d.1.weight", 4)[0]
    return {"model_type": model,
            "audio_config": {"model_type": encoder, **tower, "downsample_hidden_size": channels}}, whisper_extractor(tower, 30)


def _gemma4(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
    """The epsilon of the file is not read: the converter writes another one than the model's 1e-6."""
    channels = [require_shape(header, f"a.conv1d.{number}.weight", 4)[0] for number in (0, 1)]
    sizes = {key: tower[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    derived = {"subsampling_conv_channels": channels, "conv_kernel_size": require_shape(header, "a.blk.0.conv_dw.weight")[1],
               "use_clipped_linears": "a.blk.0.attn_q.input_max" in header.tensors,
               "output_proj_dims": require_shape(header, "a.pre_encode.out.weight")[0]}
    return {"model_type": "gemma4", "audio_config": {"model_type": "gemma4_audio", **sizes, **derived}}, \
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": tower["num_mel_bins"]}


def _gemma4_unified(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
    samples = require_shape(header, "mm.a.input_projection.weight")[1]
    return {"model_type": "gemma4_unified", "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": samples}}, \
        {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": samples}


def _granite_speech(header: GgufHeader, keys: Keys, tower: TowerConfig, text: str) -> JsonPair:
    """The LoRA adapter of early Granite Speech models is not part of an mmproj file: the text model has it merged."""
    width, ffn_width = keys.integer("embedding_length", high=1 << 16), keys.integer("feed_forward_length", high=1 << 20)
    channels, conv_kernel = require_shape(header, "a.blk.0.conv_dw.weight")
    heads = keys.integer("attention.head_count", high=1024)
    encoder = {
        "model_type": "granite_speech_encoder", "input_dim": tower["num_mel_bins"], "num_layers": tower["num_hidden_layers"],
        "hidden_dim": width, "feedforward_mult": ffn_width // width, "num_heads": heads,
        "dim_head": require_shape(header, "a.blk.0.attn_q.weight")[0] // heads,
        "output_dim": require_shape(header, "a.enc_ctc_out.weight")[0],
        "context_size":
        keys.raw.get("chunk_size"), "max_pos_emb": keys.raw.get("max_pos_emb"), "conv_kernel_size": conv_kernel,
        "conv_expansion_factor": channels // width}
    qformer_tensors = [match for name in header.tensors if (match := QFORMER_TENSOR.fullmatch(name))]
    count = len({int(part[1]) for part in qformer_tensors})
    cross_attention_layers = sorted(int(part[1]) for part in qformer_tensors if part[2] == "cross_attn_q.weight")
    frequency = cross_attention_layers[1] if len(cross_attention_layers) > 1 else max(1, count)
    if cross_attention_layers != list(range(0, count, max(1, frequency))):
        damaged(header.path, f"has cross-attention layers {cross_attention_layers} that are not evenly spaced among {count}")
    qformer_ffn_width, qformer_width = require_shape(header, "a.proj_blk.0.ffn_up.weight")
    qformer = {"model_type": "blip_2_qformer", "hidden_size": qformer_width, "num_hidden_layers": count,
               "num_attention_heads": keys.raw.get("projector.head_count"), "intermediate_size": qformer_ffn_width,
               "encoder_hidden_size": width,
               "cross_attention_frequency": frequency}
    num_mels = keys.integer("num_mel_bins", high=1024) // 2
    return {"model_type": "granite_speech", "encoder_config": encoder, "projector_config": qformer, "has_lora_adapter": False,
            "window_size":
            keys.raw.get("projector.window_size"), "downsample_rate": keys.raw.get("projector.downsample_rate")}, \
        {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "melspec_kwargs": {"n_mels": num_mels}}


# Projector type -> builder of the JSON files.
BUILDERS: Mapping[str, Callable[..., JsonPair]] = {
    "gemma4a": _gemma4, "gemma4ua": _gemma4_unified, "granite_speech": _granite_speech, "musicflamingo": _whisper("audioflamingo3"),
    "qwen2.5o":
    _qwen2_5_omni, "qwen2a": _whisper("qwen2_audio"), "qwen3a": _qwen3_audio, "voxtral": _whisper("voxtral")}
