#!/usr/bin/env python3
"""Time per image of a vision encoder of SigLIP's shape with 400 million random weights, against torch in float32.

The whole model's folder is created with transformers, whose model is the other side; both process the same image, alternating, with the
same number of threads, ours with weights in their stored type. Figures are medians over rounds.

    python benchmarks/vision_encoder.py [--patches 729 4096] [--layers 27 3] [--rounds 5] [--no-results]

Needs 4 GB of memory, 4 GB of disk, torch and transformers (`make setup`), and some three minutes.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from effllm.offload.hardware import cpu_threads
from effllm.runtime.config import read_config
from effllm.runtime.images import IMAGE_INPUT, EncodingJob, encoder_of
from report import Figure, parser_of, publish

PATCH, WIDTH = 14, 64
TEXT = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": 1000}
STORED = {"f32": torch.float32, "bf16": torch.bfloat16}
INTRO = ("A SigLIP tower of 1,152 channels, 16 heads and an inner layer of 4,304, random weights, and LLaVA's projector: one picture, "
         "{threads} threads, all sides by turns, medians of {rounds} behind one that is not counted.")


def made(folder: Path, patches: int, layers: int, stored: torch.dtype) -> LlavaForConditionalGeneration:
    side = round(patches**0.5) * PATCH
    vision = SiglipVisionConfig(hidden_size=1152, intermediate_size=4304, num_hidden_layers=layers, num_attention_heads=16, image_size=side,
                                patch_size=PATCH, vision_use_head=False)
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=vision, image_token_index=900, vision_feature_layer=-1,
                         vision_feature_select_strategy="full")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).to(stored).eval()
    model.save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    ready = {"image_processor_type": "SiglipImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
             "image_mean": half, "image_std": half, "resample": 3, "rescale_factor": 1 / 255, "size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(ready))
    return model.float()


def measured(patches: int, layers: int, rounds: int) -> dict[str, float]:
    """Seconds per image, by side."""
    side = round(patches**0.5) * PATCH
    points = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    values = torch.from_numpy(points.astype(np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
    with tempfile.TemporaryDirectory() as temporary:
        sides, rows = {}, {}
        for name, stored in STORED.items():
            folder = Path(temporary) / name
            model = made(folder, patches, layers, stored)
            sight = encoder_of(folder, read_config(folder), IMAGE_INPUT)
            sides[name] = lambda sight=sight: sight.encode(points, EncodingJob()).rows
            if name == "f32":
                sides["torch"] = lambda model=model: model.get_image_features(pixel_values=values).pooler_output[0].numpy()
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with torch.inference_mode():
            for _ in range(1 + rounds):
                for name, encode in sides.items():
                    started = perf_counter()
                    rows[name] = encode()
                    seconds[name].append(perf_counter() - started)
    worst = np.abs(rows["f32"] - rows["torch"]).max() / np.abs(rows["torch"]).max()
    assert worst < 1e-3, f"the sides see something else: {worst:.2g} of the largest"
    return {name: median(times[1:]) for name, times in seconds.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--patches", type=int, nargs="+", default=[729, 4096])
    parser.add_argument("--layers", type=int, nargs="+", default=[27, 3])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads, figures = cpu_threads(), []
    torch.set_num_threads(threads)
    for patches, layers in zip(options.patches, options.layers, strict=True):
        took, where = measured(patches, layers, options.rounds), f"{patches:,} patches, {layers} layers"
        figures.append(Figure(f"ratio_{patches}", "torch in float32, of float32 weights", where, took["torch"] / took["f32"], "x"))
        figures += [Figure(f"{name}_{patches}", label, where, took[name], "s") for name, label in
                    (("f32", "float32 weights"), ("bf16", "bfloat16 weights"), ("torch", "torch in float32"))]
    publish("picture-towers", "Towers that look at pictures", INTRO.format(threads=threads, rounds=options.rounds), figures,
            not options.no_results)


if __name__ == "__main__":
    main()
