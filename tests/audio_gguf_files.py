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
from mmproj_files import _more, _shape, _written, put
from omni_models import OMNI_LOOKED
from safetensors.torch import load_file

# Family -> the architecture of its text model's file, the type of what hears, and of what sees.
EARS = {"qwen2_audio": ("qwen2", "qwen2a", None), "audioflamingo3": ("qwen2", "musicflamingo", None), "voxtral": ("llama", "voxtral", None),
        "granite_speech": ("granite", "granite_speech", None), "qwen3_asr": ("qwen3vl", "qwen3a", None),
        "qwen2_5_omni": ("qwen2vl", "qwen2.5o", "qwen2.5o"), "qwen3_omni_moe": ("qwen3vlmoe", "qwen3a", "qwen3vl_merger"),
        "gemma4": ("gemma4", "gemma4a", "gemma4v"), "gemma4_unified": ("gemma4", "gemma4ua", "gemma4uv")}
FLAT = {"patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2", "pos_norm": "v.patch_norm.3",
        "pos_embedding": "v.position_embd.weight", "embedding_projection": "mm.input_projection"}
PLAIN = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}  # what an export calls them
OF_EYES = ("visual.", "vision_tower.", "embed_vision.", "vision_embedder.")
OF_TOWERS = ("audio_tower.", "embed_audio.", "multi_modal_projector.", "encoder.", "projector.", *OF_EYES)
LATER = {"merger_list.": "deepstack_merger_list.", ".ln_q": ".norm", ".mlp.0": ".linear_fc1", ".mlp.2": ".linear_fc2"}
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def write_hearing_pair(folder: Path, out: Path, kind: str = "F32", **keys: object) -> tuple[Path, Path]:
    """The two files, in `out`; `kind`: the type of the encoders' matrices. `keys`: other projector metadata by their names after `clip.`;
    None omits one."""
    out.mkdir(exist_ok=True)
    write_text(folder, out / "model-F16.gguf")
    write_ears(folder, out / "mmproj-model-f16.gguf", kind, **keys)
    return out / "model-F16.gguf", out / "mmproj-model-f16.gguf"


def write_text(folder: Path, path: Path) -> None:
    """What an export writes, under the name that llama.cpp's converter has for it."""
    config = json.loads((folder / "config.json").read_text())
    arch = EARS[config["model_type"]][0]
    plain = path if arch not in PLAIN else path.with_name("plain.gguf")
    code, _, err = run_cli("export", folder, "-o", plain)
    assert code == 0, err
    if arch not in PLAIN:
        return
    text = config.get("thinker_config", config)["text_config"]
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = field.contents()
            own = key.replace(f"{PLAIN[arch]}.", f"{arch}.", 1)
            writer.add_key_value(own, value, field.types[0], field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None)
    if "mrope_section" in rope:
        writer.add_array(f"{arch}.rope.dimension_sections", [*rope["mrope_section"], 0])
    for each in reader.tensors:
        writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
    _close(writer)
    plain.unlink()


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ears(folder: Path, path: Path, kind: str = "F32", **keys: object) -> None:
    whole = json.loads((folder / "config.json").read_text())
    _, ears, eyes = EARS[whole["model_type"]]
    config = whole.get("thinker_config", whole)
    stated = {"has_audio_encoder": True, **_heard(config, ears)}
    if eyes is None or eyes == ears:
        stated |= {"projector_type": ears}
    else:
        stated |= {"audio.projector_type": ears, "vision.projector_type": eyes}
    if eyes is not None:
        stated |= {"has_vision_encoder": True, **_seen(folder, config, eyes)}
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in {**stated, **keys}.items():
        if value is not None:
            put(writer, f"clip.{key}", value)
    for name, values in _tensors(folder, config, ears, eyes):
        own = gguf.GGMLQuantizationType[kind if values.ndim == 2 and values.shape[-1] % 32 == 0 else "F32" if kind == "Q8_0" else kind
                                        if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    _close(writer)


def _heard(config: Mapping[str, object], ears: str) -> dict[str, object]:
    if ears == "gemma4ua":
        return {"audio.embedding_length": config["audio_config"]["audio_embed_dim"], "audio.block_count": 0}
    own = config["encoder_config" if ears == "granite_speech" else "audio_config"]

    def of(*names: str) -> object:
        return next(own[name] for name in names if name in own)

    width = of("hidden_size", "d_model", "hidden_dim") if ears != "granite_speech" else own["hidden_dim"]
    inner = 4 * width if ears in ("gemma4a", "granite_speech") else of("intermediate_size", "encoder_ffn_dim")
    layers = of("num_hidden_layers", "encoder_layers", "num_layers")
    stated = {"embedding_length": width, "feed_forward_length": inner, "block_count": layers,
              "attention.head_count": of("num_attention_heads", "encoder_attention_heads", "num_heads"),
              "projection_dim": config["text_config"]["hidden_size"], "attention.layer_norm_epsilon": 1e-5,
              "num_mel_bins": 16 if ears == "gemma4a" else of("num_mel_bins", "input_dim")}
    if ears == "voxtral":
        stated["projector.stack_factor"] = inner // width
    if ears == "granite_speech":
        stated |= {"chunk_size": own["context_size"], "conv_kernel_size": own["conv_kernel_size"], "max_pos_emb": own["max_pos_emb"],
                   "projector.window_size": config["window_size"], "projector.downsample_rate": config["downsample_rate"],
                   "projector.head_count": config["projector_config"]["num_attention_heads"]}
    return {f"audio.{key}": value for key, value in stated.items()}


def _seen(folder: Path, config: Mapping[str, object], eyes: str) -> dict[str, object]:
    vision = config["vision_config"]
    if eyes == "gemma4uv":
        return {"vision.patch_size": vision["patch_size"], "vision.image_size": 224, "vision.embedding_length": vision["mm_embed_dim"],
                "vision.block_count": 0, "vision.attention.layer_norm_epsilon": 1e-6, "vision.image_mean": [0.0] * 3,
                "vision.image_std": [1.0] * 3}
    if eyes == "gemma4v":
        return {**_shape({"image_size": 224, **vision}, config), "vision.image_mean": [0.0] * 3, "vision.image_std": [1.0] * 3}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= {name: [*getattr(OMNI_LOOKED, name)] for name in ("image_mean", "image_std")}
    processor.setdefault("size", {"shortest_edge": processor.get("min_pixels"), "longest_edge": processor.get("max_pixels")})
    kind = "qwen2.5vl_merger" if eyes == "qwen2.5o" else eyes
    return {**_shape({"image_size": 560, **vision} if eyes == "qwen2.5o" else vision, config), **_more(kind, config, vision, processor),
            "vision.image_mean": processor["image_mean"], "vision.image_std": processor["image_std"]}


def _tensors(folder: Path, config: Mapping[str, object], ears: str, eyes: str | None) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    norms: dict[str, dict[str, np.ndarray]] = {}
    for name, values in sorted(load_file(folder / "model.safetensors").items()):
        own, values = name.removeprefix("thinker.").removeprefix("model."), values.to(torch.float32).numpy()
        if not own.startswith(OF_TOWERS) or any(part in own for part in ("num_batches", "attention_dists", "bos_eos")):
            continue
        if own.startswith(OF_EYES):
            yield from _of_eyes(own, values, eyes, config, names)
        elif ".batch_norm." in own:
            norms.setdefault(own.rpartition(".")[0], {})[own.rpartition(".")[2]] = values
        elif ".to_kv." in own:
            for letter, rows in zip("kv", np.split(values, 2), strict=True):
                yield names.get_name(own.replace("to_kv", f"to_{letter}"), SUFFIXES), rows
        else:
            yield _of_ears(own, values, ears, names)
    for own, each in norms.items():
        scale = each["weight"] / np.sqrt(each["running_var"] + np.float32(1e-5))
        for kind, values in (("weight", scale), ("bias", each["bias"] - each["running_mean"] * scale)):
            yield names.get_name(f"{own}.{kind}", SUFFIXES), values
    if ears in ("qwen2.5o", "qwen3a"):  # which follow from their number, and are written all the same
        half = config["audio_config"]["d_model"] // 2
        angles = np.arange(1500)[:, None] * np.exp(-np.log(10_000) / (half - 1) * np.arange(half))
        yield "a.position_embd.weight", np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _of_ears(own: str, values: np.ndarray, ears: str, names: gguf.TensorNameMap) -> tuple[str, np.ndarray]:
    if ears == "gemma4ua":
        return "mm.a.input_projection.weight", values
    if own.startswith("multi_modal_projector.") and ears == "qwen3a":
        own = own.replace("multi_modal_projector.linear_", "audio_tower.proj")
    elif own.startswith("multi_modal_projector."):
        own = f"audio.{own}"
    if ears == "gemma4a":
        own = own.replace("audio_tower.", "conformer.").replace(".linear.", ".")
        own = f"model.{own}" if own.startswith("embed_audio.") else own
        if own.endswith("per_dim_scale"):
            own, values = f"{own}.weight", torch.nn.functional.softplus(torch.from_numpy(values)).numpy()
    if own.endswith("depthwise_conv1d.weight") or ".depth_conv." in own:
        values = values[:, 0]
    if own.endswith((".up_conv.weight", ".down_conv.weight")):
        values = values[..., 0]
    if own.endswith((".conv1.bias", ".conv2.bias")):
        values = values[:, None]
    if ".conv2d" in own and own.endswith(".bias"):
        values = values[:, None, None]
    name = names.get_name(own, SUFFIXES)
    assert name is not None, own
    return name, values if values.ndim else values[None]


def _of_eyes(own: str, values: np.ndarray, eyes: str | None, config: Mapping[str, object],
             names: gguf.TensorNameMap) -> Iterator[tuple[str, np.ndarray]]:
    if eyes == "gemma4uv":  # colours one plane after another, as a convolution reads them; a table for columns, then one for rows
        part = next(each for each in FLAT if each in own)
        if part in ("patch_dense", "patch_ln1") and not own.endswith("patch_dense.bias"):
            values = values.reshape(*values.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(values.shape)
        if part == "pos_embedding":
            yield FLAT[part], values.swapaxes(0, 1)
        else:
            yield f"{FLAT[part]}.{own.rpartition('.')[2]}", values
        return
    if eyes == "gemma4v":
        if own.endswith("patch_embedder.input_proj.weight"):
            side = int((values.shape[1] // 3) ** 0.5)
            values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        own = f"model.{own}".replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name = names.get_name(own + (".weight" if own.endswith("position_embedding_table") else ""), SUFFIXES)
        assert name is not None, own
        yield name, values
        return
    if eyes == "qwen3vl_merger":
        for theirs, ours in LATER.items() if ".merger" in own else ():
            own = own.replace(theirs, ours)
        yield from _written(own, values, eyes, config, names, 0)
        return
    yield from _written(own, values, "qwen2.5vl_merger", config, names, 0)
