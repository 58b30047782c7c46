"""Looped models (tokens pass through the layers several times), which transformers lacks: built from its Llama, whose last norm ends each
loop."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm


class NormedBehind(LlamaDecoderLayer):
    """Ouro's layer, with norms after both branches too."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm_2, self.post_attention_layernorm_2 = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, **beside: object) -> torch.Tensor:
        x = hidden_states
        x = x + self.input_layernorm_2(self.self_attn(hidden_states=self.input_layernorm(x), **beside)[0])
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class LoopedModel(LlamaModel):
    layer = LlamaDecoderLayer

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer(config, number) for number in range(config.num_hidden_layers))

    def forward(self, input_ids: torch.Tensor, **beside: object) -> BaseModelOutputWithPast:
        """Whole texts only: a cache would have to distinguish loops."""
        x = self.embed_tokens(input_ids)
        for _ in range(self.config.num_loops):
            x = super().forward(inputs_embeds=x, use_cache=False).last_hidden_state
        return BaseModelOutputWithPast(last_hidden_state=x)


class OuroModel(LoopedModel):
    layer = NormedBehind


class LoopedLlama(LlamaForCausalLM):
    inner: type[LoopedModel] = LoopedModel

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = self.inner(config)
        self.post_init()

    @classmethod
    def from_config(cls, config: LlamaConfig) -> "LoopedLlama":
        return cls._from_config(config)


class LoopedOuro(LoopedLlama):
    inner = OuroModel


LOOPED = {"nanbeige": LoopedLlama, "ouro": LoopedOuro}
