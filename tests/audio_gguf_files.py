"""GGUF file pairs of a folder with audio input, as llama.cpp's converters write them: the text model, and the audio and vision encoders
(mmproj). Tensor names are those of the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from command_line import run_cli
from mmproj_files import _mmproj_tensors, _projector_keys, _shape, add_key
from omni_models import OMNI_IMAGE_PROCESSOR
from safetensors.torch import load_file

# Family -> (architecture of the text model's file, projector type of the audio encoder, of the vision encoder or None).
AUDIO_FAMILIES = {"qwen2_audio": ("qwen2", "qwen2a", None), "audioflamingo3": ("qwen2", "musicflamingo", None),
                  "voxtral": ("llama", "voxtral", None),
                  "granite_speech": ("granite", "granite_speech", None), "qwen3_asr": ("qwen3vl", "qwen3a", None),
                  "qwen2_5_omni": ("qwen2vl", "qwen2.5o", "qwen2.5o"), "qwen3_omni_moe": ("qwen3vlmoe", "qwen3a", "qwen3vl_merger"),
                  "gemma4": ("gemma4", "gemma4a", "gemma4v"), "gemma4_unified": ("gemma4", "gemma4ua", "gemma4uv")}
GEMMA4_UNIFIED_NAMES = {"patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2",
                        "pos_norm": "v.patch_norm.3",
                        "pos_embedding": "v.position_embd.weight", "embedding_projection": "mm.input_projection"}
EXPORT_ARCHITECTURES = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}  # architecture -> the one `effllm export` writes
VISION_PREFIXES = ("visual.", "vision_tower.", "embed_vision.", "vision_embedder.")
TOWER_PREFIXES = ("audio_tower.", "embed_audio.", "multi_modal_projector.", "encoder.", "projector.", *VISION_PREFIXES)
QWEN3_MERGER_NAMES = {"merger_list.": "deepstack_merger_list.", ".ln_q": ".norm", ".mlp.0": ".linear_fc1", ".mlp.2": ".linear_fc2"}
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def write_audio_pair(folder: Path, out: Path, kind: str = "F32", **keys: object) -> tuple[Path, Path]:
    """Write the text model and the mmproj file of `folder` to `out`; returns their paths.

    kind: GGML type of the encoders' matrices.
    keys: projector metadata to change, by name after `clip.`; None omits a key.
    """
    out.mkdir(exist_ok=True)
    write_text(folder, out / "model-F16.gguf")
    write_mmproj(folder, out / "mmproj-model-f16.gguf", kind, **keys)
    return out / "model-F16.gguf", out / "mmproj-model-f16.gguf"


def write_text(folder: Path, path: Path) -> None:
    """Export the text model, then rename its architecture and keys to those of llama.cpp's converter."""
    config = json.loads((folder / "config.json").read_text())
    arch = AUDIO_FAMILIES[config["model_type"]][0]
    exported = path if arch not in EXPORT_ARCHITECTURES else path.with_name("plain.gguf")
    code, _, err = run_cli("export", folder, "-o", exported)
    assert code == 0, err
    if arch not in EXPORT_ARCHITECTURES:
        return
    text = config.get("thinker_config", config)["text_config"]
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    reader, writer = gguf.GGUFReader(exported), gguf.GGUFWriter(path, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = field.contents()
            new_key = key.replace(f"{EXPORT_ARCHITECTURES[arch]}.", f"{arch}.", 1)
            writer.add_key_value(new_key, value, field.types[0], field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None)
    if "mrope_section" in rope:
        writer.add_array(f"{arch}.rope.dimension_sections", [*rope["mrope_section"], 0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _close(writer)
    exported.unlink()


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_mmproj(folder: Path, path: Path, kind: str = "F32", **keys: object) -> None:
    outer_config = json.loads((folder / "config.json").read_text())
    _, audio_type, vision_type = AUDIO_FAMILIES[outer_config["model_type"]]
    config = outer_config.get("thinker_config", outer_config)
    metadata = {"has_audio_encoder": True, **_audio_keys(config, audio_type)}
    if vision_type is None or vision_type == audio_type:
        metadata |= {"projector_type": audio_type}
    else:
        metadata |= {"audio.projector_type": audio_type, "vision.projector_type": vision_type}
    if vision_type is not None:
        metadata |= {"has_vision_encoder": True, **_vision_keys(folder, config, vision_type)}
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in {**metadata, **keys}.items():
        if value is not None:
            add_key(writer, f"clip.{key}", value)
    for name, values in _tensors(folder, config, audio_type, vision_type):
        tensor_type = gguf.GGMLQuantizationType[kind if values.ndim == 2 and values.shape[-1] % 32 == 0 else "F32" if kind == "Q8_0"
                                                else kind
                                                if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), tensor_type), raw_dtype=tensor_type)
    _close(writer)


def _audio_keys(config: Mapping[str, object], audio_type: str) -> dict[str, object]:
    if audio_type == "gemma4ua":
        return {"audio.embedding_length": config["audio_config"]["audio_embed_dim"], "audio.block_count": 0}
    audio = config["encoder_config" if audio_type == "granite_speech" else "audio_config"]

    def of(*names: str) -> object:
        return next(audio[name] for name in names if name in audio)

    width = of("hidden_size", "d_model", "hidden_dim") if audio_type != "granite_speech" else audio["hidden_dim"]
    inner = 4 * width if audio_type in ("gemma4a", "granite_speech") else of("intermediate_size", "encoder_ffn_dim")
    layers = of("num_hidden_layers", "encoder_layers", "num_layers")
    metadata = {"embedding_length": width, "feed_forward_length": inner, "block_count": layers,
                "attention.head_count": of("num_attention_heads", "encoder_attention_heads", "num_heads"),
                "projection_dim": config["text_config"]["hidden_size"], "attention.layer_norm_epsilon": 1e-5,
                "num_mel_bins": 16 if audio_type == "gemma4a" else of("num_mel_bins", "input_dim")}
    if audio_type == "voxtral":
        metadata["projector.stack_factor"] = inner // width
    if audio_type == "granite_speech":
        metadata |= {"chunk_size": audio["context_size"], "conv_kernel_size": audio["conv_kernel_size"],
                     "max_pos_emb": audio["max_pos_emb"],
                     "projector.window_size": config["window_size"], "projector.downsample_rate": config["downsample_rate"],
                     "projector.head_count": config["projector_config"]["num_attention_heads"]}
    return {f"audio.{key}": value for key, value in metadata.items()}


def _vision_keys(folder: Path, config: Mapping[str, object], vision_type: str) -> dict[str, object]:
    vision = config["vision_config"]
    if vision_type == "gemma4uv":
        return {"vision.patch_size": vision["patch_size"], "vision.image_size": 224, "vision.embedding_length": vision["mm_embed_dim"],
                "vision.block_count": 0, "vision.attention.layer_norm_epsilon": 1e-6, "vision.image_mean": [0.0] * 3,
                "vision.image_std": [1.0] * 3}
    if vision_type == "gemma4v":
        return {**_shape({"image_size": 224, **vision}, config), "vision.image_mean": [0.0] * 3, "vision.image_std": [1.0] * 3}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= {name: [*getattr(OMNI_IMAGE_PROCESSOR, name)] for name in ("image_mean", "image_std")}
    processor.setdefault("size", {"shortest_edge": processor.get("min_pixels"), "longest_edge": processor.get("max_pixels")})
    kind = "qwen2.5vl_merger" if vision_type == "qwen2.5o" else vision_type
    return {**_shape({"image_size": 560, **vision} if vision_type == "qwen2.5o" else vision, config),
            **_projector_keys(kind, config, vision, processor),
            "vision.image_mean": processor["image_mean"], "vision.image_std": processor["image_std"]}


def _tensors(folder: Path, config: Mapping[str, object], audio_type: str, vision_type: str | None) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    norms: dict[str, dict[str, np.ndarray]] = {}
    for name, values in sorted(load_file(folder / "model.safetensors").items()):
        key, values = name.removeprefix("thinker.").removeprefix("model."), values.to(torch.float32).numpy()
        if not key.startswith(TOWER_PREFIXES) or any(part in key for part in ("num_batches", "attention_dists", "bos_eos")):
            continue
        if key.startswith(VISION_PREFIXES):
            yield from _vision_tensors(key, values, vision_type, config, names)
        elif ".batch_norm." in key:
            norms.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = values
        elif ".to_kv." in key:
            for letter, rows in zip("kv", np.split(values, 2), strict=True):
                yield names.get_name(key.replace("to_kv", f"to_{letter}"), SUFFIXES), rows
        else:
            yield _audio_tensor(key, values, audio_type, names)
    for key, norm in norms.items():
        scale = norm["weight"] / np.sqrt(norm["running_var"] + np.float32(1e-5))
        for kind, values in (("weight", scale), ("bias", norm["bias"] - norm["running_mean"] * scale)):
            yield names.get_name(f"{key}.{kind}", SUFFIXES), values
    if audio_type in ("qwen2.5o", "qwen3a"):  # sinusoidal, but written to the file nevertheless
        half = config["audio_config"]["d_model"] // 2
        angles = np.arange(1500)[:, None] * np.exp(-np.log(10_000) / (half - 1) * np.arange(half))
        yield "a.position_embd.weight", np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _audio_tensor(key: str, values: np.ndarray, audio_type: str, names: gguf.TensorNameMap) -> tuple[str, np.ndarray]:
    if audio_type == "gemma4ua":
        return "mm.a.input_projection.weight", values
    if key.startswith("multi_modal_projector.") and audio_type == "qwen3a":
        key = key.replace("multi_modal_projector.linear_", "audio_tower.proj")
    elif key.startswith("multi_modal_projector."):
        key = f"audio.{key}"
    if audio_type == "gemma4a":
        key = key.replace("audio_tower.", "conformer.").replace(".linear.", ".")
        key = f"model.{key}" if key.startswith("embed_audio.") else key
        if key.endswith("per_dim_scale"):
            key, values = f"{key}.weight", torch.nn.functional.softplus(torch.from_numpy(values)).numpy()
    if key.endswith("depthwise_conv1d.weight") or ".depth_conv." in key:
        values = values[:, 0]
    if key.endswith((".up_conv.weight", ".down_conv.weight")):
        values = values[..., 0]
    if key.endswith((".conv1.bias", ".conv2.bias")):
        values = values[:, None]
    if ".conv2d" in key and key.endswith(".bias"):
        values = values[:, None, None]
    name = names.get_name(key, SUFFIXES)
    assert name is not None, key
    return name, values if values.ndim else values[None]


def _vision_tensors(key: str, values: np.ndarray, vision_type: str | None, config: Mapping[str, object],
                    names: gguf.TensorNameMap) -> Iterator[tuple[str, np.ndarray]]:
    if vision_type == "gemma4uv":  # channels first, as a convolution reads patches; the position table of columns, then that of rows
        part = next(candidate for candidate in GEMMA4_UNIFIED_NAMES if candidate in key)
        if part in ("patch_dense", "patch_ln1") and not key.endswith("patch_dense.bias"):
            values = values.reshape(*values.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(values.shape)
        if part == "pos_embedding":
            yield GEMMA4_UNIFIED_NAMES[part], values.swapaxes(0, 1)
        else:
            yield f"{GEMMA4_UNIFIED_NAMES[part]}.{key.rpartition('.')[2]}", values
        return
    if vision_type == "gemma4v":
        if key.endswith("patch_embedder.input_proj.weight"):
            side = int((values.shape[1] // 3) ** 0.5)
            values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        key = f"model.{key}".replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name = names.get_name(key + (".weight" if key.endswith("position_embedding_table") else ""), SUFFIXES)
        assert name is not None, key
        yield name, values
        return
    if vision_type == "qwen3vl_merger":
        for hf_part, usual_part in QWEN3_MERGER_NAMES.items() if ".merger" in key else ():
            key = key.replace(hf_part, usual_part)
        yield from _mmproj_tensors(key, values, vision_type, config, names, 0)
        return
    yield from _mmproj_tensors(key, values, "qwen2.5vl_merger", config, names, 0)
