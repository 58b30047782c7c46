"""Tiny models with ternary weights for tests, as transformers reads them: BitNet's family and Llama's, in both packed layouts and as
floats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitNetQuantConfig, PreTrainedModel
from transformers.integrations import bitnet

SIZES = {"vocab_size": 301, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AUTO = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = {**AUTO, "quantization_mode": "online"}
PLAIN = {"quant_method": "bitnet", "modules_to_not_convert": None}  # bitlinear, as Falcon 3's say


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


def ternary(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values -1, 0, 1 and their scale, by the model's own rule."""
    mean = weight.float().abs().mean().clamp(min=1e-5)
    return (weight.float() / mean).round().clamp(-1, 1), mean


def write(folder: Path, family: str, section: dict[str, object], dtype: str = "bfloat16", packed: bool = True,
          **changes: object) -> None:
    """A folder whose linear layers are as `section` says; offline ones not `packed` lie as floats."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(1 + 0.3 * torch.randn_like(each) if "norm" in name else 0.4 * torch.randn_like(each))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_linear(name) or section.get("quantization_mode") == "online":
            tensors[name] = tensor
            continue
        values, mean = ternary(tensor)
        tensors[name] = bitnet.pack_weights(values.clone()) if packed else values.to(tensor.dtype)
        scale = mean if section.get("linear_class") == "autobitlinear" else 1 / mean
        tensors[f"{name}_scale"] = scale.reshape(1).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


def oracle(folder: Path) -> PreTrainedModel:
    """transformers' model of a folder: its own layers, everything beside the codes in float32. Floats are rounded by its own rule in the
    type in which they are stored, as they are where the model runs in that type."""
    raw = json.loads((folder / "config.json").read_text())
    section = raw.pop("quantization_config")
    tensors, online = load_file(folder / "model.safetensors"), section.get("quantization_mode") == "online"
    auto = section.get("linear_class") == "autobitlinear"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32)
    told = BitNetQuantConfig(linear_class="autobitlinear" if auto else "bitlinear", quantization_mode="offline")
    with torch.compiler.set_stance("force_eager"):
        replaced = bitnet.replace_with_bitnet_linear(model, ["lm_head"], told)
        for name, tensor in list(tensors.items()):
            if online and is_linear(name):
                tensors[name], tensors[f"{name}_scale"] = bitnet.WeightQuant.apply(tensor), torch.ones(1)
            elif auto and tensor.dtype == torch.uint8:
                tensors[name] = bitnet.unpack_weights(tensor, torch.float32)
    tensors = {name: tensor if tensor.dtype == torch.uint8 else tensor.float() for name, tensor in tensors.items()}
    missing, unexpected = replaced.to_empty(device="cpu").load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    replaced.tie_weights()
    rotary = type(replaced.model.rotary_emb)(replaced.config)
    replaced.model.rotary_emb = rotary
    return replaced.eval()


def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()
