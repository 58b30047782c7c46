"""Small models with trained drafters: Gemma 4's assistants as in transformers, and EAGLE-3 heads in torch, after the paper
(arXiv:2503.01840, section 3.1) and the layout of published checkpoints."""

import json
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from family_models import CASES, GEMMA_4, KEYS_AS_VALUES, Case, written
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified_assistant import Gemma4UnifiedAssistantForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

VOCABULARY = 300
# Targets: one whose last layers share keys and values, one in which all layers have their own, and one that takes images.
TARGETS = {"shared": {**GEMMA_4, "max_position_embeddings": 768},
           "own": {**GEMMA_4, **KEYS_AS_VALUES, "max_position_embeddings": 768},
           "unified": {**CASES["gemma4_unified"].changes, "max_position_embeddings": 768}}


def with_assistant(base: Path, kind: str = "shared", groups: int = 20, dtype: str = "float32",
                   window: int = 40) -> tuple[nn.Module, nn.Module]:
    """A random Gemma 4 in base / "model" and an assistant for it in base / "draft", both as transformers reads them. `groups`: of its
    vocabulary, 0 for one that scores all tokens; `window`: that its layers see the model's keys through."""
    with sharing():
        return _with_assistant(base, kind, groups, dtype, window)


def _with_assistant(base: Path, kind: str, groups: int, dtype: str, window: int) -> tuple[nn.Module, nn.Module]:
    unified = "gemma4_unified" if kind == "unified" else "gemma4"
    target = written(Case(f"{unified}_text", TARGETS[kind], dtype=dtype, images=kind == "unified"), base / "model")
    own = target.config.get_text_config()
    text = AutoConfig.for_model(f"{unified}_text", **{
        **TARGETS[kind], "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": None,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 3,
        "use_double_wide_mlp": False, "attention_k_eq_v": kind != "shared", "sliding_window": window,
        **({} if kind == "unified" else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0})})
    more = {"use_ordered_embeddings": True, "num_centroids": groups, "centroid_intermediate_top_k": 3} if groups else {}
    config = AutoConfig.for_model(f"{unified}_assistant", text_config=text.to_dict(), backbone_hidden_size=own.hidden_size, **more)
    torch.manual_seed(5)
    made = Gemma4UnifiedAssistantForCausalLM if kind == "unified" else Gemma4AssistantForCausalLM
    draft = made(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.2)
        if groups:
            draft.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    draft.save_pretrained(base / "draft")
    return target, made.from_pretrained(base / "draft", dtype=torch.float32).eval()


def sharing() -> AbstractContextManager[object]:
    """While models are made: layers that share keys and values, also where no layer of the same model has them, and the last layers of
    either kind that keep theirs for an assistant, also where none of the model shares. transformers 5.23 does neither."""

    def modes(config: object) -> list[str | None]:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        last = {kind: layer for layer, kind in enumerate(config.layer_types[:first])}
        return ["reuse" if layer >= first else "store" if layer in last.values() else None for layer in range(config.num_hidden_layers)]

    both = ExitStack()
    for kind in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        both.enter_context(patch.object(kind, "kv_sharing_modes", property(modes)))
    return both


def guessed_by(target: nn.Module, draft: nn.Module, ids: list[int], tokens: int, window: int) -> list[torch.Tensor]:
    """Scores [V] of the assistant's tokens behind a text, of which the target has read all but the last: it sees what keys lie in a window
    that ends at the place of the last."""
    with torch.inference_mode():
        out = target(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        shared = {kind: tuple(tensor for tensor in pair) for kind, pair in out.shared_kv_states.items()}
        near = min(window - 1, len(ids) - 1)
        shared["sliding_attention"] = tuple(tensor[:, :, -near:] for tensor in shared["sliding_attention"])
    return guessed_from(target, draft, shared, out.hidden_states[-1][:, -1:], ids, tokens)


def guessed_from(target: nn.Module, draft: nn.Module, shared: dict[str, tuple[torch.Tensor, torch.Tensor]], state: torch.Tensor,
                 ids: list[int], tokens: int) -> list[torch.Tensor]:
    """The same from keys and values [1, heads, tokens, size] and a state [1, 1, D] of the target."""
    token, guessed = ids[-1], []
    with torch.inference_mode():
        for _ in range(tokens):
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            output = draft(inputs_embeds=torch.cat([embedded, state], -1), position_ids=torch.tensor([[len(ids) - 1]]),
                           shared_kv_states=shared, attention_mask=None)
            guessed.append(output.logits[0, 0].double())
            state, token = output.last_hidden_state, int(guessed[-1].argmax())
    return guessed


@dataclass
class Head:
    """An EAGLE-3 head in float64, with the model that it drafts for and the embedding that it reads."""

    layer: nn.Module
    rotary: nn.Module
    parts: dict[str, nn.Module]
    offsets: torch.Tensor
    normed: bool
    embed: nn.Module | None
    target: nn.Module | None = None
    reads: tuple[int, ...] = (2, 3, 3)
    more: tuple[nn.Module, ...] = ()
    fed_normed: bool = False

    def scores(self, ids: list[int], tokens: int) -> list[torch.Tensor]:
        """Of each of so many guesses behind a text, of which the target has read all but the last, float64 [draft vocabulary]."""
        scores, text = [], list(ids)
        with torch.inference_mode():
            captured = []
            modules = [self.target.model.layers[layer] for layer in self.reads] if "fc" in self.parts else [self.target.model.norm]
            hooks = [hooked.register_forward_pre_hook(lambda module, args: captured.append(args[0])) for hooked in modules]
            self.target(torch.tensor([ids[:-1]]), use_cache=False)
            for hook in hooks:
                hook.remove()
            states = self._joined(captured)
            for _ in range(tokens):
                hidden = self._layer(self.embed(torch.tensor([text[1:]])), states)
                scores.append(self.parts["lm_head"](self.parts["norm"](hidden[:, -1]))[0])
                hooked = int(scores[-1].argmax())
                text.append(hooked + int(self.offsets[hooked]))
                fed = self.parts["norm"](hidden[:, -1:]) if self.fed_normed else hidden[:, -1:]
                states = torch.cat([states, fed], 1)
        return scores

    def _joined(self, captured: list[torch.Tensor]) -> torch.Tensor:
        if "fc" not in self.parts:
            return self.target.model.norm(captured[0])
        norms = [self.parts.get(f"fc_norm.{at}", nn.Identity()) for at in range(len(captured))]
        joined = torch.cat([norm(state) for norm, state in zip(norms, captured, strict=True)], -1)
        return self.parts["fc"](self.parts.get("input_norm", nn.Identity())(joined))

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        normed = self.parts["hidden_norm"](states)
        joined = torch.cat([self.layer.input_layernorm(embedded), normed], -1)
        count = joined.shape[1]
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        angles = self.rotary(joined, torch.arange(count)[None])
        x = (normed if self.normed else states) + self.layer.self_attn(joined, position_embeddings=angles, attention_mask=mask)[0]
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        for layer in self.more:
            x = layer(x, position_embeddings=angles, attention_mask=mask)
        return x


def with_head(base: Path, family: str = "llama", **asked: object) -> Head:
    """A random model in base / "model" and an EAGLE-3 head for it in base / "draft", which is as `saved_head` has it."""
    target = written(Case(family, {"num_hidden_layers": 6, "max_position_embeddings": 768, "head_dim": 16}), base / "model").double()
    head = saved_head(base / "draft", target.config.hidden_size, VOCABULARY, **asked)
    head.target, head.embed = target, head.embed or target.model.embed_tokens
    return head


def saved_head(folder: Path, width: int, vocabulary: int, scored: int = 120, hidden: int = 0, normed: bool = False, newer: bool = False,
               layers: int = 1, norms: str = "", fed_normed: bool = False, joins: bool = True, kind: str = "llama",
               pickled: bool = False, **stated: object) -> Head:
    """A random head in `folder`, for a model of that width and vocabulary with six layers. `scored`: the tokens that it says; `hidden`: its
    width, where another; `newer`: as speculators writes it; `norms`: before its matrix, "one" or "each"; `joins`: it has that matrix;
    `pickled`: by torch.save; `stated`: more of its config."""
    narrow, hidden = bool(hidden), hidden or width
    made_of, layer_type = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen3": (Qwen3Config, Qwen3DecoderLayer)}[kind]
    config = made_of(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=72, num_hidden_layers=layers, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, max_position_embeddings=768, rms_norm_eps=1e-5, attn_implementation="eager")
    torch.manual_seed(6)
    layer, more = layer_type(config, 0), tuple(layer_type(config, layer_index).double().eval() for layer_index in range(1, layers))
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer.self_attn, name, nn.Linear(2 * hidden, getattr(layer.self_attn, name).out_features, bias=False))
    parts = {"fc": nn.Linear(3 * width, hidden, bias=False), "lm_head": nn.Linear(hidden, scored, bias=False),
             "norm": LlamaRMSNorm(hidden, 1e-5), "hidden_norm": LlamaRMSNorm(hidden, 1e-5)}
    if norms == "one":
        parts["input_norm"] = LlamaRMSNorm(3 * width, 1e-5)
    elif norms == "each":
        parts |= {f"fc_norm.{at}": LlamaRMSNorm(width, 1e-5) for at in range(3)}
    if not joins:
        parts.pop("fc")
    embed = nn.Embedding(vocabulary, hidden) if narrow else None
    with torch.no_grad():
        for parameter in (layer_index for part in (layer, *more, *parts.values()) for layer_index in part.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.normal_(0, 0.2)
    draft_vocabulary = torch.randperm(vocabulary)[:scored].sort().values
    offsets = draft_vocabulary - torch.arange(scored)
    prefix = "layers.0." if newer else "midlayer."
    tensors = {f"{prefix}{name}": value for name, value in layer.state_dict().items()}
    tensors |= {f"{prefix if name == 'hidden_norm' else ''}{name}.weight": part.weight for name, part in parts.items()}
    tensors |= {f"layers.{at}.{name}": value.float() for at, extra_layer in enumerate(more, 1) for name,
                value in extra_layer.state_dict().items()}
    if narrow:
        tensors["embed_tokens.weight"] = embed.weight
    if scored != vocabulary:
        tensors |= {"d2t": offsets, "t2d": torch.isin(torch.arange(vocabulary), draft_vocabulary)}
    folder.mkdir(parents=True)
    tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    flags = {"norm_before_residual": normed, "norm_before_fc": norms == "one", "fc_norm": norms == "each", "norm_output": fed_normed}
    outer = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": scored, **({"target_hidden_size": width} if narrow else {}),
             **{name: True for name, is_set in flags.items() if is_set},
             **({} if joins else {"eagle_config": {"use_aux_hidden_state": False}}), **stated}
    inner = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    head_config = {**outer, "speculators_model_type": "eagle3", "transformer_layer_config": inner} if newer else {**inner, **outer}
    (folder / "config.json").write_text(json.dumps(head_config))
    return Head(layer.double().eval(), LlamaRotaryEmbedding(config), {name: part.double() for name, part in parts.items()}, offsets, normed,
                embed.double() if narrow else None, more=more, fed_normed=fed_normed)
