"""RWKV 7 as defined in its paper (arXiv 2503.14456), token by token in torch, under the names of published checkpoints: the oracle, since
transformers lacks the family. `test_rwkv7.py` checks it against equations in NumPy, and against llama.cpp."""

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Rwkv7Config(PretrainedConfig):
    model_type = "rwkv7"

    def __init__(self, vocab_size: int = 300, hidden_size: int = 64, intermediate_size: int = 88, num_hidden_layers: int = 3,
                 head_dim: int = 16, decay_low_rank_dim: int = 8, a_low_rank_dim: int = 12, v_low_rank_dim: int = 4,
                 gate_low_rank_dim: int = 16, norm_eps: float = 1e-5, norm_bias: bool = True, hidden_act: str = "sqrelu", **rest: object):
        self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers = (
            vocab_size, hidden_size, intermediate_size, num_hidden_layers)
        self.head_dim, self.norm_eps, self.norm_bias, self.hidden_act = head_dim, norm_eps, norm_bias, hidden_act
        self.decay_low_rank_dim, self.a_low_rank_dim = decay_low_rank_dim, a_low_rank_dim
        self.v_low_rank_dim, self.gate_low_rank_dim = v_low_rank_dim, gate_low_rank_dim
        super().__init__(**{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, **rest})


class Pair(nn.Module):
    """Two matrices with an activation in between."""

    def __init__(self, width: int, rank: int, act: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(width, rank, bias=False), act, nn.Linear(rank, width, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora(x)


def before(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 0, 1, -1))


class TimeMix(nn.Module):
    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.hidden_size // config.head_dim
        for letter in "rwkvag":
            setattr(self, f"x_{letter}", nn.Parameter(torch.rand(1, 1, width)))
        self.k_k, self.k_a = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.r_k = nn.Parameter(0.5 * torch.randn(self.heads, config.head_dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w_lora = Pair(width, config.decay_low_rank_dim, nn.Tanh())
        if layer:
            self.v_lora = Pair(width, config.v_low_rank_dim, nn.Identity())
        self.a_lora = Pair(width, config.a_low_rank_dim, nn.Identity())
        self.g_lora = Pair(width, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(self.heads, width, eps=config.head_dim * config.norm_eps)

    def forward(self, x: torch.Tensor, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        row = {letter: torch.lerp(x, before(x), getattr(self, f"x_{letter}")) for letter in "rwkvag"}
        r, k, v = self.r_proj(row["r"]), self.k_proj(row["k"]), self.v_proj(row["v"])
        decay = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=x.dtype)) * torch.sigmoid(self.w_lora(row["w"])))
        v = v if first is None else torch.lerp(v, first, torch.sigmoid(self.v_lora(row["v"])))
        rate, split = torch.sigmoid(self.a_lora(row["a"])), (*x.shape[:2], self.heads, -1)
        removed = functional.normalize((k * self.k_k).view(split), dim=-1)
        k = (k * (1 + (rate - 1) * self.k_a)).view(split)
        rate, r, own, decay = rate.view(split), r.view(split), v.view(split), decay.view(split)
        state, out = x.new_zeros(len(x), self.heads, k.shape[-1], k.shape[-1]), []  # a row for each channel of values
        for t in range(x.shape[1]):
            turn = torch.diag_embed(decay[:, t]) - removed[:, t, :, :, None] * (removed * rate)[:, t, :, None]
            state = state @ turn + own[:, t, :, :, None] * k[:, t, :, None]
            out.append((state @ r[:, t, :, :, None])[..., 0])
        read = self.g_norm(torch.stack(out, 1).flatten(0, 1).flatten(1)).view(x.shape)
        read = read + ((r * k * self.r_k).sum(-1, keepdim=True) * own).view(x.shape)
        return self.o_proj(read * self.g_lora(row["g"])), v


class ChannelMix(nn.Module):
    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.rand(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(functional.relu(self.key(torch.lerp(x, before(x), self.x_k))) ** 2)


class Layer(nn.Module):
    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        for name in ("pre_norm", "attn_norm", "ffn_norm")[bool(layer):]:
            setattr(self, name, nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias))
        self.attn, self.ffn = TimeMix(config, layer), ChannelMix(config)

    def forward(self, x: torch.Tensor, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if first is not None else self.pre_norm(x)
        mixed, values = self.attn(self.attn_norm(x), first)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x)), values if first is None else first


class Rwkv7Base(PreTrainedModel):
    config_class, base_model_prefix = Rwkv7Config, "model"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, self.config.initializer_range)


class Rwkv7Model(Rwkv7Base):
    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        self.post_init()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, first = self.embeddings(ids), None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.norm(x)


class Rwkv7ForCausalLM(Rwkv7Base):
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__(config)
        self.model, self.lm_head = Rwkv7Model(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, **rest: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


AutoConfig.register("rwkv7", Rwkv7Config)
AutoModelForCausalLM.register(Rwkv7Config, Rwkv7ForCausalLM)
