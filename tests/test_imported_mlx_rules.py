"""MLX folders of families that mlx-lm computes differently from their publishers, or stores less of: we run the published model, checked
against transformers with the dequantized values."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options
from mlx_checkpoints import switched
from mlx_families import ROUNDED, random_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from effllm.offload.checkpoint import TensorStore
from effllm.offload.notes import Fallback
from effllm.runtime.convert import convert
from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.source import open_weights
from effllm.runtime.stores.canonical_names import canonicalize_names

IDS = [int(each) for each in np.random.default_rng(0).integers(3, 319, 24)]
FILE, CORRECTION = "model.safetensors", ".moe_statics.e_score_correction_bias"


def names_as_published(folder: Path) -> dict[str, str]:
    """Of tensors, by those that they have here."""
    with TensorStore.open(folder) as store:
        before = {info.offset: name for name, info in store.tensors.items()}
        canonicalize_names(store, json.loads((folder / "config.json").read_text())["model_type"])
        return {name: before[info.offset] for name, info in store.tensors.items()}


def both(tmp_path: Path, case: str) -> tuple[Path, Path]:
    """A random model as MLX has it, and one in 32 bits whose weights are what those codes mean."""
    ours, plain = tmp_path / "mlx", tmp_path / "plain"
    random_folder(ours, case)
    shutil.copytree(ours, plain)
    source, published = load_file(ours / FILE), names_as_published(ours)
    save_file({name: values for name, values in source.items() if not name.endswith(CORRECTION)}, ours / FILE, metadata={"format": "pt"})
    meant = {published[name]: torch.from_numpy(values) for name, values in switched(ours).items()}
    tensors = load_file(ours / FILE)
    save_file({name: values.squeeze() if ".act_fn." in name else values for name, values in tensors.items()}, ours / FILE)
    save_file({name: torch.zeros_like(values) if name.endswith(CORRECTION) else meant.get(name, values)
               for name, values in source.items()}, plain / FILE, metadata={"format": "pt"})
    return ours, plain


@pytest.mark.parametrize("case", ["apertus", "ernie4_5_moe", "jamba", "mamba2, groups", "minicpm3, tied"])
def test_answers_are_those_of_the_published_model(tmp_path: Path, case: str) -> None:
    ours, plain = both(tmp_path, case)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].numpy()
    *_, engine = open_engine(ours, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2, exact=True))
    found = np.array(engine.forward_logits(IDS))
    engine.close()
    assert np.abs(found - wanted).max() < ROUNDED.get(case, 1e-4) * np.abs(wanted).max()


def test_routers_that_lack_what_corrects_them_are_reported(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, "ernie4_5_moe")
    store, _ = open_weights(ours)
    with store:
        said = [notice for notice in store.notices if "corrects the scores" in notice]
        assert len(said) == 1 and isinstance(said[0], Fallback)
    *_, _ = convert(ours, tmp_path / "small", options())
    *_, engine = open_engine(tmp_path / "small", EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2))
    assert np.isfinite(engine.forward_logits(IDS)).all()
    engine.close()
