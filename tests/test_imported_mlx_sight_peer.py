"""Folders that mlx-vlm makes of small random models that see: pictures are seen as by what it was made of, logits are those of mlx-vlm."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

sys.path.insert(0, str(Path(__file__).parent))
from sight_cases import CASES
from sight_models import PICTURES, opened, seeing

from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.images import MLX_SIGHTS, Work

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.skipif(find_spec("mlx_vlm") is None, reason="needs mlx-vlm")]
SQUARE = {"height": 128, "width": 128}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
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
    """Rotary positions, and of Qwen 2 and 2.5 VL all that is said of the text part, under the older names."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = raw["text_config"]
    rope = text.get("rope_parameters")
    if "sliding_attention" in rope:
        text |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
                 "sliding_window_pattern": 6}
    else:
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
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


@pytest.mark.parametrize("kind", MLX_SIGHTS)
def test_pictures_and_text_are_those_of_what_it_was_made_of(tmp_path: Path, kind: str) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    text, vision, words, more, processor = CASES[kind]
    if kind == "gemma3":  # mlx-vlm takes 256 rows to be a picture's, and every sixth layer to be without a window
        text = {**text, "num_hidden_layers": 7}
        vision, more, processor = {**vision, "image_size": 128}, {**more, "mm_tokens_per_image": 256}, Gemma3ImageProcessorPil(size=SQUARE)
    wide = {name: 64 for name in ("out_hidden_size", "hidden_size") if name in vision and kind.startswith("qwen") and (
        name == "out_hidden_size" or "embed_dim" in vision)}
    seeing(source, kind, ({**text, **SIZES}, vision, words, more, processor), **wide)
    tell_as_published(source)
    found = subprocess.run([sys.executable, "-c", THEIRS, str(source), str(made), json.dumps(IDS)], capture_output=True, text=True,
                           env=os.environ, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    ours, theirs = opened(made), opened(source)
    for picture in PICTURES.values():
        seen, wanted = ours.see(picture, Work()), theirs.see(picture, Work())
        assert np.array_equal(seen.rows, wanted.rows) and seen.tokens == wanted.tokens
    logits = np.load(tmp_path / "made.npy")
    *_, engine = open_engine(made, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    mine = np.array(engine.forward_logits(IDS))
    engine.close()
    assert np.abs(mine - logits).max() < 1e-3 * np.abs(logits).max()
