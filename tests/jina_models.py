"""Small models like Jina Embeddings v2 with random weights for tests, and their expected output: transformers has no class for them."""

import json
from pathlib import Path

import numpy as np
import torch
from encoder_models import WORDS, made_encoder, random_model
from safetensors.torch import save_file

LAYERS, INNER, ROWS = 3, 80, len(WORDS) + 3


def jina(folder: Path, of_code: bool = False, heads: int = 4, width: int = 48, **said: object) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as Jina's are published, the model for code or the others, and its tensors in float64."""
    torch.manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (ROWS, width),
                                          "embeddings.token_type_embeddings.weight": (2, width)}
    norms, (up, down, last) = ["embeddings.LayerNorm"], (
        ("mlp.up_gated_layer", "mlp.down_layer", "layer_norm_2") if of_code else ("mlp.gated_layers", "mlp.wo", "mlp.layernorm"))
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}attention.{name}.weight": (width, width), f"{at}attention.{name}.bias": (width,)}
        shapes |= {f"{at}{up}.weight": (2 * INNER, width), f"{at}{down}.weight": (width, INNER), f"{at}{down}.bias": (width,)}
        norms += [f"{at}attention.output.LayerNorm", f"{at}{last}"]
        norms += [f"{at}{each}" for each in ("layer_norm_1", "attention.self.layer_norm_q", "attention.self.layer_norm_k") if of_code]
    tensors = {name: torch.randn(*shape) * 0.2 for name, shape in shapes.items()}
    tensors |= {f"{name}.{part}": torch.randn(width) * 0.2 + (part == "weight") for name in norms for part in ("weight", "bias")}
    folder = made_encoder(folder, random_model("Bert"))
    save_file(tensors, folder / "model.safetensors")
    where = "jinaai/jina-bert-v2-qk-post-norm" if of_code else "jinaai/jina-bert-implementation"
    (folder / "config.json").write_text(json.dumps({
        "_name_or_path": where, "model_max_length": 8192, "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": f"{where}--modeling_bert.JinaBertModel"}, "attention_probs_dropout_prob": 0.0, "classifier_dropout": None,
        "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": width,
        "initializer_range": 0.02, "intermediate_size": INNER, "layer_norm_eps": 1e-12, "max_position_embeddings": 8192,
        "model_type": "bert", "num_attention_heads": heads, "num_hidden_layers": LAYERS, "pad_token_id": 0,
        "position_embedding_type": "alibi", "torch_dtype": "float16", "transformers_version": "4.26.0", "type_vocab_size": 2,
        "use_cache": True, "vocab_size": ROWS, "feed_forward_type": "geglu", "emb_pooler": "mean", "attn_implementation": "torch", **said}))
    return folder, {name: each.double() for name, each in tensors.items()}


def slopes(heads: int) -> list[float]:
    """As ALiBi's authors give them: of twice as many heads every other one, where heads are no power of two."""
    whole = 2 ** int(np.log2(heads))
    return [2 ** (-8 * at / whole) for at in range(1, whole + 1)] + (slopes(2 * whole)[::2][: heads - whole] if heads > whole else [])


def jina_states(tensors: dict[str, torch.Tensor], ids: list[int], heads: int = 4, relu: bool = False) -> np.ndarray:
    """Hidden states of such a model for token ids."""
    functional, (_, width), length = torch.nn.functional, tensors["embeddings.word_embeddings.weight"].shape, len(ids)
    act = functional.relu if relu else functional.gelu
    places = torch.arange(length, dtype=torch.float64)
    leaning = -torch.tensor(slopes(heads), dtype=torch.float64)[:, None, None] * (places[:, None] - places).abs()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (width,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        of_code, own = f"{at}layer_norm_1.weight" in tensors, f"{at}attention.self."
        q, k, v = (linear(x, f"{own}{part}") for part in ("query", "key", "value"))
        if of_code:
            q, k = norm(q, f"{own}layer_norm_q"), norm(k, f"{own}layer_norm_k")
        q, k, v = (each.reshape(length, heads, -1).transpose(0, 1) for each in (q, k, v))
        scores = q @ k.transpose(1, 2) / (width / heads) ** 0.5 + leaning
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width)
        y = norm(linear(mixed, f"{at}attention.output.dense") + x, f"{at}attention.output.LayerNorm")
        if of_code:
            y = norm(y + x, f"{at}layer_norm_1")
            up, gate = linear(y, f"{at}mlp.up_gated_layer").chunk(2, -1)
            x = norm(y + linear(up * act(gate), f"{at}mlp.down_layer"), f"{at}layer_norm_2")
        else:
            gate, up = linear(y, f"{at}mlp.gated_layers").chunk(2, -1)
            x = norm(linear(act(gate) * up, f"{at}mlp.wo") + y, f"{at}mlp.layernorm")
    return x.numpy()
