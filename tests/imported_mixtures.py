"""Mixtures of experts in import formats, whose files need repacking before kernels read them, for tests."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from family_models import Case
from gguf_samples import weights
from safetensors.torch import save_file
from saved_models import saved
from test_imported import CASES as IMPORTED

GPTQ_SHAPE = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 32,
              "moe_intermediate_size": 192, "num_hidden_layers": 2, "norm_topk_prob": True}


def imported_mixture(folder: Path, name: str, shape: Mapping[str, object] = GPTQ_SHAPE, family: str = "qwen3_moe") -> None:
    """A random mixture, all of whose matrices but router, embedding and head are quantized as a case of `test_imported.py` is."""
    section, quantize = IMPORTED[name]
    saved(Case(family, dict(shape)), folder)
    tensors = {}
    for tensor, values in weights(folder).items():
        if "_proj" not in tensor:
            tensors[tensor] = torch.from_numpy(values)
            continue
        base = tensor.removesuffix("weight")
        tensors |= {base + part: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value)).contiguous()
                    for part, value in quantize(values)[0].items()}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": section}))
