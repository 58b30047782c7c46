"""Small models with a layer for multi-token prediction, and its expected output: transformers' decoder layer of the family (transformers
itself does not run such layers), between norms and the joining matrix (DeepSeek V3, section 2.2)."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from export_models import MODELS, SIZES
from family_models import Case, written
from safetensors.torch import load_file, save_file
from saved_tokenizers import with_words_of_fable
from torch import nn

from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine
from effllm.runtime.speculation.mtp_tensors import MTP_NAMES, mtp_model_layer

LING = (("self_attn", "attention"), ("o_proj", "dense"), ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"),
        ("e_score_correction_bias", "expert_bias"))


@dataclass
class MtpReference:
    """transformers' model, and the modules of its MTP layer."""

    model: nn.Module
    layer: nn.Module
    join: nn.Linear
    norms: tuple[nn.Module, nn.Module, nn.Module]  # of embeddings, of states, before the head
    state_first: bool = False

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The MTP layer's logits float64 [T - 1, V]: at each token but the first, for the token after it."""
        base, tokens = text_part(self.model), torch.tensor([ids])
        with torch.inference_mode():
            states = base(tokens, use_cache=False).last_hidden_state[:, :-1]
            joined = [self.norms[0](base.embed_tokens(tokens[:, 1:])), self.norms[1](states)]
            joined = torch.cat(joined[::-1] if self.state_first else joined, -1)
            mtp_model = copy.copy(base)
            mtp_model.config = copy.deepcopy(base.config)
            mtp_model.config.num_hidden_layers = 1
            if getattr(mtp_model.config, "layer_types", None):
                mtp_model.config.layer_types = ["full_attention"]
            mtp_model._modules = {**base._modules, "layers": nn.ModuleList([self.layer]), "norm": self.norms[2]}
            return self.model.lm_head(mtp_model(inputs_embeds=self.join(joined), use_cache=False).last_hidden_state)[0]


def text_part(model: nn.Module) -> nn.Module:
    """The module around the layers, for a model that may take images."""
    return model.model.language_model if "language_model" in model.model._modules else model.model


def save_mtp_model(case: Case, folder: Path, counts: bool = False) -> MtpReference:
    """Save a random model with an MTP layer. `counts`: the model generates consecutive ids, and its MTP layer predicts them."""
    model = written(case, folder)
    config = read_config(folder)
    base, layer_index = text_part(model), mtp_model_layer(config)
    torch.manual_seed(7)
    norm = type(base.norm)
    tensor_names, path = MTP_NAMES[config.family], folder / "model.safetensors"
    layer = type(base.layers[layer_index])(base.config, layer_index)
    norms = tuple(norm(config.hidden_size, eps=config.norm_eps) if name else base.norm for name in tensor_names.norms)
    join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    with torch.no_grad():
        for module in (*layer.parameters(), *join.parameters()):
            module.normal_(0, 0.2)
        for module in filter(lambda module: module is not base.norm, norms):
            module.weight.add_(0.3 * torch.randn_like(module.weight))
        for name, buffer in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
        if counts:
            make_counting(model, layer, join, norms)
    names = [text.format(config.num_hidden_layers) for text in (tensor_names.prefix, tensor_names.block)]
    tensors = {f"{names[1]}{name}": value for name, value in published(config.family, layer.state_dict()).items()}
    named_modules = zip((tensor_names.join, *tensor_names.norms), (join, *norms), strict=True)
    tensors |= {f"{names[0]}{name}.weight": module.weight for name, module in named_modules if name}
    stored = load_file(path)
    if counts:
        stored |= {name: value for name, value in model.state_dict().items() if name in stored}
    save_file({**stored, **{name: value.detach().to(stored[next(iter(stored))].dtype).contiguous() for name, value in tensors.items()}},
              path, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    inner = raw.get("text_config", raw)
    inner["mtp_num_hidden_layers" if names[0] == "mtp." else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(raw))
    base.config._experts_implementation = "eager"  # the implementation that supports float64
    return MtpReference(model.double(), layer.double().eval(), join.double(), tuple(module.double() for module in norms),
                        tensor_names.state_first)


def published(family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors under the names of published checkpoints, for a family that transformers lacks."""
    if family != "bailing_moe_v2":
        return tensors
    renamed = {name: value for name, value in tensors.items() if name.split(".")[1] not in ("q_proj", "k_proj", "v_proj")}
    renamed["self_attn.query_key_value.weight"] = torch.cat([tensors[f"self_attn.{letter}_proj.weight"] for letter in "qkv"])
    for hf_name, ling_name in LING:
        renamed = {name.replace(hf_name, ling_name): value for name, value in renamed.items()}
    return renamed


def source(name: str, folder: Path) -> Path:
    """A model with the layer, 16-bit weights and a tokenizer."""
    case: Case = MODELS[name]
    save_mtp_model(replace(case, changes={**SIZES, **case.changes}, dtype="float16"), folder)
    return with_words_of_fable(folder)


def make_counting(model: nn.Module, layer: nn.Module, join: nn.Linear, norms: tuple[nn.Module, ...]) -> None:
    """Set weights so that each token predicts the next id: blocks add nothing, and a token's head row is the embedding of the id before."""
    base = text_part(model)
    for block in (*base.layers, layer):
        for name, parameter in block.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
    for norm in (base.norm, *norms):
        norm.weight.fill_(0.0 if type(norm).__name__.startswith("Qwen3_5") else 1.0)
    embedded = nn.functional.normalize(base.embed_tokens.weight, dim=-1)
    base.embed_tokens.weight.copy_(embedded)
    model.lm_head.weight.copy_(embedded.roll(1, 0))
    join.weight.zero_()
    join.weight[:, : join.out_features] = torch.eye(join.out_features)


def mtp_logits(engine: Engine, ids: list[int]) -> list[float]:
    """The logits of the engine's MTP layer after `ids`, the last of which is the sampled token."""
    drafts = engine.speculation._model
    for _ in engine.prefill(ids[:-1]):
        continue
    drafts.follow(ids)
    drafts._truncate(len(ids) - 1)
    x = drafts._consume([*drafts._ids[len(drafts._ids) - drafts._num_pending + 1 :], ids[-1]])
    with engine.model.outer() as outer:
        return engine.backends["cpu"].logits(x, outer.mtp.norm, outer.head)[0].copy()
