#!/usr/bin/env python3
"""Time per image of vision encoders from timm, and whether their outputs match (transformers uses the same ones): FastVLM's, with
--mobilenet Gemma 3n's, and with --perception the smaller one of Perception LM.

An encoder has its published size (125 million weights; the others 300) and random weights in float32; the other side is timm's module in
torch. Both process the same pixels, alternating, with the same number of threads. Figures are medians over rounds.

    pip install --no-deps timm torchvision      # of torch's version; into a folder of their own on PYTHONPATH, say
    python benchmarks/timm_encoders.py [--mobilenet | --perception] [--rounds 3] [--no-results]

Needs 3 GB of memory (6 with --mobilenet), torch and safetensors (`make setup`), and a minute (some with --mobilenet).
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import save_file

from effllm.offload.checkpoint import TensorStore
from effllm.offload.hardware import cpu_threads
from effllm.runtime.config_reader import Keys
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.fast_vlm import ARCHITECTURES
from effllm.runtime.images.fastvit import load_fastvit
from effllm.runtime.images.mobilenet import load_mobilenet
from effllm.runtime.images.perception_encoder import ARCHITECTURES as ENCODERS
from effllm.runtime.images.perception_encoder import load_encoder
from effllm.runtime.images.tower_ops import WorkerPool
from effllm.runtime.images.tower_weights import Weights
from report import Figure, parser_of, publish

ENCODER = "vit_pe_lang_large_patch14_448"
PREFIX, ROWS = "vision_tower.timm_model.", 16  # rows of a picture in a row and in a column
Encode = Callable[[np.ndarray, WorkerPool], np.ndarray]
# Operators of torchvision that it describes when it is imported and nothing here calls: beside a torch for CPUs its own are not loaded.
UNUSED = ("nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward",
          "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d", "_deform_conv2d_backward")
INTRO = ("{what} random weights in float32, a picture of {side} points a side: {threads} threads, both sides by turns, "
         "medians of {rounds} behind one that is not counted. Rows differ by {worst:.1g} of the largest.")


@dataclass(frozen=True)
class Tower:
    """`timm`: its name in timm, `options`: its arguments there; `read`: builds ours from its tensors."""

    title: str
    what: str
    timm: str
    options: dict[str, object]
    side: int
    read: Callable[[Weights], Encode]


def read_fastvit(weights: Weights) -> Encode:
    return load_fastvit(weights, PREFIX, *ARCHITECTURES["fastvit_mci3"]).seen


def read_mobilenet(weights: Weights) -> Encode:
    tower = load_mobilenet(weights, PREFIX)
    return lambda values, pool: tower(values, ROWS, pool)


def read_encoder(weights: Weights) -> Encode:
    says, first = ENCODERS[ENCODER]
    tower = load_encoder(weights, PREFIX, Keys(says), first)
    return lambda values, pool: tower.seen([values], pool)


TOWERS = {"fastvit": Tower("FastVLM's tower", "FastViTHD of 125 million", "fastvit_mci3", {"inference_mode": True}, 1024, read_fastvit),
          "mobilenet": Tower("Gemma 3n's tower", "MobileNet V5 of 300 million", "mobilenetv5_300m_enc", {}, 768, read_mobilenet),
          "perception": Tower("Perception LM's tower", "A Perception Encoder of 300 million", ENCODER, {}, 448, read_encoder)}


def made(tower: Tower) -> torch.nn.Module:
    described = torch.library.Library("torchvision", "FRAGMENT")
    for name in UNUSED:
        described.define(f"{name}(Tensor x) -> Tensor")
    import timm

    torch.manual_seed(0)
    model = timm.create_model(tower.timm, num_classes=0, **tower.options).eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.ndim)]:
            tensor.add_(torch.rand_like(tensor) * 0.02)
    return model


def read(model: torch.nn.Module, tower: Tower) -> Encode:
    with tempfile.TemporaryDirectory() as folder:
        save_file({PREFIX + name: tensor.contiguous() for name, tensor in model.state_dict().items()}, Path(folder) / "model.safetensors")
        with Weights(TensorStore.open(Path(folder)), "the module") as weights:
            return tower.read(weights)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mobilenet", action="store_true", help="Gemma 3n's tower")
    parser.add_argument("--perception", action="store_true", help="Perception LM's tower of 300 million weights")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tag = "mobilenet" if options.mobilenet else "perception" if options.perception else "fastvit"
    tower, threads = TOWERS[tag], cpu_threads()
    torch.set_num_threads(threads)
    model = made(tower)
    our_encoder, values = read(model, tower), np.random.default_rng(0).random((tower.side, tower.side, 3), np.float32)

    def ours() -> np.ndarray:
        with WorkerPool(threads, EncodingJob()) as pool:
            return our_encoder(values, pool)

    def theirs() -> np.ndarray:
        with torch.inference_mode():
            seconds = model.forward_features(torch.from_numpy(values).permute(2, 0, 1)[None])
        return seconds[0, model.num_prefix_tokens :].numpy() if seconds.ndim == 3 else seconds.flatten(2)[0].T.numpy()

    sides, took, rows = {"ours": ours, "torch": theirs}, {"ours": [], "torch": []}, {}
    for _ in range(1 + options.rounds):
        for name, encode in sides.items():
            started = perf_counter()
            rows[name] = encode()
            took[name].append(perf_counter() - started)
    worst = np.abs(rows["ours"] - rows["torch"]).max() / np.abs(rows["torch"]).max()
    assert worst < 1e-4, f"the sides see something else: {worst:.2g} of the largest"
    seconds = {name: median(times[1:]) for name, times in took.items()}
    when = f"{tower.side:,} points a side"
    intro = INTRO.format(what=tower.what, side=f"{tower.side:,}", threads=threads, rounds=options.rounds, worst=worst)
    publish(tag, tower.title, intro, [Figure("ratio", "torch's time by ours", when, seconds["torch"] / seconds["ours"], "x"),
                                      Figure("ours", "ours", when, seconds["ours"], "s"),
                                      Figure("torch", "timm's module in torch", when, seconds["torch"], "s")], not options.no_results)


if __name__ == "__main__":
    main()
