"""Small models like Nomic Embed v2 (mixture of experts) with random weights for tests, and their expected output: transformers has no class
for them."""

import json
from pathlib import Path

import numpy as np
import torch
from encoder_models import WORDS, made_encoder, random_model
from safetensors.torch import save_file


def nomic_moe(folder: Path, biased: bool = True) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as Nomic Embed v2 is published, and its tensors in float64."""
    torch.manual_seed(6)
    width, inner, experts, rows = 48, 80, 4, len(WORDS) + 3
    norms = [f"encoder.layers.{layer}.norm{number}" for layer in range(4) for number in (1, 2)]
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (rows, width),
                                          "embeddings.token_type_embeddings.weight": (1, width)}
    for layer in range(4):
        at = f"encoder.layers.{layer}."
        shapes |= {f"{at}attn.Wqkv.weight": (3 * width, width), f"{at}attn.Wqkv.bias": (3 * width,),
                   f"{at}attn.out_proj.weight": (width, width), f"{at}attn.out_proj.bias": (width,)}
        if layer % 2:
            shapes |= {f"{at}mlp.router.layer.weight": (experts, width), f"{at}mlp.experts.bias": (width,),
                       **{f"{at}mlp.experts.mlp.{name}": (experts * inner, width) for name in ("w1", "w2")}}
        else:
            shapes |= {f"{at}mlp.fc1.weight": (inner, width), f"{at}mlp.fc1.bias": (inner,), f"{at}mlp.fc2.weight": (width, inner),
                       f"{at}mlp.fc2.bias": (width,)}
    tensors = {name: torch.randn(*shape) * 0.2 for name, shape in shapes.items()}
    tensors |= {f"{name}.{part}": torch.randn(width) * 0.2 + (part == "weight")
                for name in ("emb_ln", *norms) for part in ("weight", "bias")}
    for name in tensors:
        if name.endswith("experts.bias") and not biased:
            tensors[name].zero_()
    folder = made_encoder(folder, random_model("NomicBert"))
    save_file(tensors, folder / "model.safetensors")
    said = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "n_embd": width, "n_inner": inner, "n_layer": 4, "n_head": 4,
            "n_positions": 400, "vocab_size": rows, "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "prenorm": False,
            "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "type_vocab_size": 1, "num_experts": experts, "moe_top_k": 2,
            "moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "num_shared_experts": 0, "expert_choice_router": False,
            "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "ffn_div": 1, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, {name: each.double() for name, each in tensors.items()}


def nomic_states(tensors: dict[str, torch.Tensor], ids: list[int]) -> np.ndarray:
    """Hidden states of such a model for token ids, one token and one head at a time where that is clearest."""
    functional, width, heads = torch.nn.functional, 48, 4
    depth, length = width // heads, len(ids)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (width,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, depth, 2, dtype=torch.float64) / depth)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = norm(tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for layer in range(4):
        at = f"encoder.layers.{layer}."
        q, k, v = linear(x, f"{at}attn.Wqkv").reshape(length, 3, heads, depth).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", turned(q), turned(k)) * depth**-0.5
        x = norm(x + linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, width), f"{at}attn.out_proj"), f"{at}norm1")
        if layer % 2:
            up, down = (tensors[f"{at}mlp.experts.mlp.{name}"].reshape(-1, 80, width) for name in ("w1", "w2"))
            fed = torch.zeros_like(x) + tensors[f"{at}mlp.experts.bias"]
            for token, shares in enumerate(linear(x, f"{at}mlp.router.layer").softmax(-1)):
                for expert in shares.topk(2).indices:
                    fed[token] += shares[expert] * (functional.gelu(up[expert] @ x[token]) @ down[expert])
        else:
            fed = linear(functional.gelu(linear(x, f"{at}mlp.fc1")), f"{at}mlp.fc2")
        x = norm(x + fed, f"{at}norm2")
    return x.numpy()
