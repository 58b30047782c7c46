"""Compares mlx-vlm folders of small random vision models with their source models and with mlx-vlm's own output.

A program of its own, since mlx-vlm depends on more than belongs among the peers; none of that is needed here:

    pip install --no-deps mlx-vlm
    python tests/mlx_vision_check.py

It prints, for every supported vision type, the distance of image rows from those of the source, and of logits from mlx-vlm's.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from vision_cases import CASES, PATCHES, QWEN, ROPE
from vision_models import FIRST, PICTURES, open_encoder, save_vision_model

from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.images import MLX_VISION_PREFIXES, EncodingJob

SQUARE = {"height": 128, "width": 128}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
PLACES = {**QWEN, "num_position_embeddings": 36}
MIXED = {**DELTA, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 64}
WORDS = (["<|image_pad|>", "<|vision_start|>"], {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1}, PATCHES)
OWN = {**CASES, "qwen3_5": ({"model_type": "qwen3_5_text", **MIXED}, PLACES, *WORDS),
       "qwen3_5_moe": ({"model_type": "qwen3_5_moe_text", **MIXED, **SHARED}, PLACES, *WORDS),
       "qwen3_vl_moe": ({"model_type": "qwen3_vl_moe_text", "rope_parameters": ROPE, **EXPERTS},
                        {**PLACES, "deepstack_visual_indexes": [0, 2]}, *WORDS)}
IDS = [int(each) for each in np.random.default_rng(0).integers(3, 4000, 24)]
# What mlx-vlm makes of a folder, towers left as they are, and the logits that it computes: with 16-bit scales, in float32.
THEIRS = """
import json, shutil, sys
from pathlib import Path
import mlx.core as mx, numpy as np
from mlx_vlm.quant_utils import quantize_model
from mlx_vlm.utils import load_config, load_model, save_config, save_weights, skip_multimodal_module
source, made, ids = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
model, config = load_model(source, lazy=True), load_config(source)
model.language_model.set_dtype(mx.bfloat16)
model, config = quantize_model(model, config, 32, 4, mode="affine", quant_predicate=lambda path, _: not skip_multimodal_module(path))
save_weights(made, model)
for file in source.glob("*.json"):
    if not file.name.endswith(".index.json"):
        shutil.copy(file, made)
save_config(config, config_path=made / "config.json")
model.language_model.set_dtype(mx.float32)
found = model.language_model(mx.array([ids]))
np.save(str(made) + ".npy", np.array(found.logits.astype(mx.float32))[0])
"""


def tell_as_published(folder: Path) -> None:
    """Write rotary positions and, for Qwen 2 and 2.5 VL, the whole text config under the older names."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = raw["text_config"]
    rope = text.get("rope_parameters")
    if "sliding_attention" in rope:
        text |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
                 "sliding_window_pattern": 6}
    else:
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    if raw["model_type"] == "qwen3_vl_moe":  # inputs before outputs
        tensors = load_file(folder / "model.safetensors")
        save_file({name: values.swapaxes(1, 2).contiguous() if ".experts." in name else values for name, values in tensors.items()},
                  folder / "model.safetensors", metadata={"format": "pt"})
    if raw["model_type"].endswith("moe"):
        text |= {"num_experts": EXPERTS["num_experts"], "tie_word_embeddings": raw["tie_word_embeddings"]}
    if raw["model_type"].startswith("qwen3_5"):
        del text["rope_scaling"]
    if raw["model_type"].startswith("qwen2"):
        del raw["text_config"], text["rope_parameters"]
        raw = {**text, **raw}
    if raw["model_type"] == "gemma3":
        tensors = load_file(folder / "model.safetensors")
        save_file({re.sub(r"^(model\.)?vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): values
                   for name, values in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        raw["vision_config"]["model_type"] = raw["model_type"]
    path.write_text(json.dumps(raw))


def compared(folder: Path, kind: str) -> tuple[float, float]:
    """The largest distance of rows and of logits, relative to the largest of each."""
    source, made = folder / "source", folder / "made"
    text, vision, words, more, processor = OWN[kind]
    if kind == "gemma3":  # mlx-vlm takes 256 rows to be an image's, and every sixth layer to be without a window
        text = {**text, "num_hidden_layers": 7}
        vision, more, processor = {**vision, "image_size": 128}, {**more, "mm_tokens_per_image": 256}, Gemma3ImageProcessorPil(size=SQUARE)
    wide = {name: 64 for name in ("out_hidden_size", "hidden_size") if name in vision and kind.startswith("qwen") and (
        name == "out_hidden_size" or "embed_dim" in vision)}
    save_vision_model(source, kind, ({**text, **SIZES}, vision, words, more, processor), **wide)
    tell_as_published(source)
    subprocess.run([sys.executable, "-c", THEIRS, str(source), str(made), json.dumps(IDS)], check=True, capture_output=True, env=os.environ)
    ours, theirs, apart = open_encoder(made), open_encoder(source), []
    for picture in PICTURES.values():
        seen, wanted = ours.encode(picture, EncodingJob()).rows, theirs.encode(picture, EncodingJob()).rows
        apart.append(float(np.abs(seen - wanted).max() / np.abs(wanted).max()))
    logits = np.load(folder / "made.npy")
    *_, engine = open_engine(made, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    mine = np.array(engine.forward_logits(IDS))
    engine.close()
    return max(apart), float(np.abs(mine - logits).max() / np.abs(logits).max())


if __name__ == "__main__":
    for each in sys.argv[1:] or MLX_VISION_PREFIXES:
        with tempfile.TemporaryDirectory() as place:
            print("{}: rows {:.1e}, logits {:.1e}".format(each, *compared(Path(place), each)), flush=True)
