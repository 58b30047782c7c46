"""FastViT in torch for tests: written from its papers, under timm's tensor names, in the reparameterized form without branches.

transformers takes FastVLM's encoder from timm, which tests should not require; `wrapped` substitutes this one. A peer test compares it with
timm's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from perception_torch import PerceptionEncoder
from torch import nn
from torch.nn import functional as F
from transformers.models.timm_wrapper import modeling_timm_wrapper

LAYERS, WIDTHS = (1, 2, 1, 1, 1), (8, 16, 32, 64, 64)
ARGS = {"inference_mode": True, "layers": list(LAYERS), "embed_dims": list(WIDTHS)}


class Plain(nn.Module):
    """A convolution merged from several branches; `curve`: whether GELU follows, `squeezed`: squeeze-and-excitation before it."""

    def __init__(self, width: int, out: int, side: int, stride: int = 1, groups: int = 1, curve: bool = True, squeezed: bool = False):
        super().__init__()
        self.reparam_conv = nn.Conv2d(width, out, side, stride, side // 2, groups=groups)
        self.curve, self.se = curve, nn.Module() if squeezed else None
        if squeezed:
            self.se.fc1, self.se.fc2 = nn.Conv2d(out, out // 16, 1), nn.Conv2d(out // 16, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.reparam_conv(x)
        if self.se is not None:
            x = x * self.se.fc2(self.se.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return F.gelu(x) if self.curve else x


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 0.3))


class Ffn(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Sequential()
        self.conv.add_module("conv", nn.Conv2d(width, width, 7, padding=3, groups=width, bias=False))
        self.conv.add_module("bn", nn.BatchNorm2d(width))
        self.fc1, self.fc2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(self.conv(x))))


class Mixing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.token_mixer, self.mlp = Plain(width, width, 3, groups=width, curve=False), Ffn(width)
        self.layer_scale = Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token_mixer(x)
        return x + self.layer_scale.gamma * self.mlp(x)


class Attending(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mlp, self.token_mixer = nn.LayerNorm(width), Ffn(width), nn.Module()
        self.token_mixer.qkv, self.token_mixer.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.layer_scale_1, self.layer_scale_2 = Scale(width), Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x.flatten(2).mT)
        q, k, v = self.token_mixer.qkv(rows).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        found = ((q @ k.mT) / 32**0.5).softmax(-1) @ v
        x = x + self.layer_scale_1.gamma * self.token_mixer.proj(found.transpose(1, 2).flatten(2)).mT.reshape(x.shape)
        return x + self.layer_scale_2.gamma * self.mlp(x)


class FastVit(nn.Module):
    def __init__(self, layers: list[int], embed_dims: list[int], inference_mode: bool):
        super().__init__()
        assert inference_mode
        first, last = embed_dims[0], 2 * embed_dims[-1]
        self.stem = nn.Sequential(Plain(3, first, 3, 2), Plain(first, first, 3, 2, groups=first), Plain(first, first, 1))
        self.stages = nn.Sequential()
        for number, (count, width) in enumerate(zip(layers, embed_dims, strict=True)):
            stage = nn.Sequential()
            if number:
                before = embed_dims[number - 1]
                stage.add_module("downsample", nn.Sequential())
                stage.downsample.add_module("proj", nn.Sequential(Plain(before, width, 7, 2, groups=before), Plain(width, width, 1)))
            if number > 2:
                stage.add_module("pos_emb", Plain(width, width, 7, groups=width, curve=False))
            stage.add_module("blocks", nn.Sequential(*[(Attending if number > 2 else Mixing)(width) for _ in range(count)]))
            self.stages.append(stage)
        self.final_conv = Plain(embed_dims[-1], last, 3, groups=embed_dims[-1], squeezed=True)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.final_conv(self.stages(self.stem(x)))

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@contextmanager
def wrapped() -> Iterator[None]:
    """Context in which transformers finds a timm whose only encoders are this one and the Perception Encoder."""

    def made(config: object, num_classes: int, **args: object) -> nn.Module:
        named = config.architecture
        return PerceptionEncoder(named, **args) if named.startswith("vit_pe") else FastVit(**args)

    with patch.multiple(modeling_timm_wrapper, requires_backends=lambda *_: None,
                        _create_timm_model_with_error_handling=made):
        yield
