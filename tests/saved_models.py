"""Folders of random models, created with transformers from a case: for tests that run them there too, and for those that only need a
folder."""

import json
from pathlib import Path

import torch
from family_sizes import CONTEXT, Case
from looped_models import LOOPED
from more_family_cases import BESIDE, SIGHT, SIGHTS
from remapped_checkpoints import BASE_FAMILY, PUBLISHED_LAYOUTS, zero_pruned_parts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# The models that take images, by their text model.
IMAGES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4_unified",
          "mistral": "mistral3", "ministral3": "mistral3", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
# Llama 4 with images, in transformers 5.24, reads this of its text model's outputs, which lack it.
MoeCausalLMOutputWithPast.image_outputs = None


def saved(case: Case, folder: Path) -> None:
    """Write what `written` writes. Reading it back takes as long as creating it, which most tests do not need."""
    _save(case, folder)
    _retell(case, folder)


def written(case: Case, folder: Path) -> PreTrainedModel:
    """Save a random model in `folder` and return it as transformers reads it, in float32."""
    reader = _save(case, folder)
    model = None if case.older else _read(reader, folder)
    _retell(case, folder)
    model = model or _read(reader, folder)
    if case.family.startswith("gemma") and case.dtype != "float32":  # the factor has the type of the weights
        for scaled in (module for module in model.modules() if hasattr(module, "embed_scale")):
            scaled.embed_scale = scaled.embed_scale.to(getattr(torch, case.dtype)).float()
    return model


def _outer(case: Case) -> str:
    """The `model_type` of the enclosing model, "" if there is none."""
    return case.inside or (IMAGES[case.family] if case.images else "")


def _save(case: Case, folder: Path) -> type:
    """As transformers writes it. Returns what reads it back."""
    config = AutoConfig.for_model(BASE_FAMILY.get(case.family, case.family), **{
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.2, "pad_token_id": None,
        **case.changes})
    outer = _outer(case)
    if outer:
        sight = None if case.family.startswith("gemma4") else SIGHTS.get(outer, SIGHT)
        tied = getattr(config, "tie_word_embeddings", False)
        more = {"mm_tokens_per_image": 4} if case.family == "gemma3_text" else {"tie_word_embeddings": tied, **BESIDE.get(outer, {})}
        config = AutoConfig.for_model(outer, text_config=config.to_dict(), vision_config=sight, **more)
    torch.manual_seed(1)
    read = LOOPED.get(case.family) or (AutoModelForImageTextToText if outer else AutoModelForCausalLM)
    model = read.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("bias", "q_norm.weight", "k_norm.weight")):  # norms start at 1, biases at 0
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif case.family == "glm5_next_text" and name.endswith(("kpool_compress_ape", "kpool_compress_gate", "hc.fn")):
                # which start as nothing, or alike, or small
                parameter.normal_(0, 0.2)
            elif name.endswith(("router.gate.weight", "ple.conv1d.weight")) and not parameter.any():  # which would choose alike, or add 0
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):  # which start at 0, or 1
                buffer.add_(0.3 * torch.randn_like(buffer))
            elif name.endswith("balancing_biases"):  # of which transformers reads the last, of no expert, as -1 whatever is stored
                buffer.normal_(-1, 0.1)
                buffer[-1] = -1
            elif name.endswith("rotary_emb.alpha"):
                buffer.normal_(0, 0.2)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
        if case.family == "nemotron_nas":
            zero_pruned_parts(model)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard)
    return read


def _read(reader: type, folder: Path) -> PreTrainedModel:
    return reader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _retell(case: Case, folder: Path) -> None:
    """Names and keys as published checkpoints have them where transformers writes others, or as older releases of it wrote them."""
    outer = _outer(case)
    if (told := outer if outer in PUBLISHED_LAYOUTS else case.family) in PUBLISHED_LAYOUTS:
        PUBLISHED_LAYOUTS[told](folder)
    if case.older:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        inner = raw.pop("text_config", raw)
        section, kind = inner.pop("rope_parameters"), None if inner is raw else "mrope"
        raw = {**inner, **raw, "rope_theta": section.pop("rope_theta"), "torch_dtype": raw.pop("dtype"), "rope_scaling":
               {"type": kind or section["rope_type"], **{key: value for key, value in section.items() if key != "rope_type"}}}
        raw.pop("dtype", None)
        path.write_text(json.dumps(raw))
