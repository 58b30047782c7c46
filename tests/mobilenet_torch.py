"""MobileNet V5 in torch for tests: written from the names and shapes of timm's tensors, as small as possible.

transformers takes Gemma 3n's encoder from timm, which tests should not require; `wrapped` substitutes this one.
`benchmarks/timm_encoders.py` with --mobilenet compares ours with timm's at its published size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.timm_wrapper import modeling_timm_wrapper

WIDTH, COUNT, SIDE = 40, 2, 96  # of rows, how many are in a row, and of an image


class Conv(nn.Conv2d):
    """With padding such that the size is divided by the stride; an odd amount has the extra part at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = []
        for size, side, stride in zip(reversed(x.shape[-2:]), self.kernel_size, self.stride, strict=True):
            total = max((-(-size // stride) - 1) * stride + side - size, 0)
            around += [total // 2, total - total // 2]
        return super().forward(F.pad(x, around))


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * self.weight[:, None, None]


class ConvNorm(nn.Module):
    def __init__(self, width: int, out: int, side: int = 1, stride: int = 1, alone: bool = False, curve: bool = False, bias: bool = False):
        super().__init__()
        self.conv, self.bn, self.curve = Conv(width, out, side, stride, groups=width if alone else 1, bias=bias), Norm(out), curve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x))
        return F.gelu(x, approximate="tanh") if self.curve else x


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma[:, None, None]


class Edge(nn.Module):
    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.conv_exp, self.bn1 = Conv(width, 4 * width, 3, stride, bias=False), Norm(4 * width)
        self.conv_pwl, self.bn2 = Conv(4 * width, out, 1, bias=False), Norm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv_pwl(F.gelu(self.bn1(self.conv_exp(x)), approximate="tanh")))
        return x + y if x.shape == y.shape else y


class Inverted(nn.Module):
    """`start`, `middle`: kernel sizes of depthwise convolutions before and after the expansion, 0 for none."""

    def __init__(self, width: int, out: int, stride: int, start: int, middle: int, times: int, added: bool = True):
        super().__init__()
        self.dw_start = ConvNorm(width, width, start, 1 if middle else stride, alone=True) if start else nn.Identity()
        self.pw_exp = ConvNorm(width, times * width, curve=True)
        self.dw_mid = ConvNorm(times * width, times * width, middle, stride, alone=True, curve=True) if middle else nn.Identity()
        self.pw_proj = ConvNorm(times * width, out)
        self.layer_scale, self.added = Scale(out) if added else nn.Identity(), added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return x + y if self.added and x.shape == y.shape else y


class Attending(nn.Module):
    """`stride`: subsampling of keys and values."""

    def __init__(self, width: int, heads: int, depth: int, stride: int):
        super().__init__()
        self.norm, self.attn, self.layer_scale, self.heads, self.depth = Norm(width), nn.Module(), Scale(width), heads, depth
        for name, wide in (("query", heads * depth), ("key", depth), ("value", depth)):
            part = nn.Sequential()
            if stride > 1 and name != "query":
                part.add_module("down_conv", Conv(width, width, 3, stride, groups=width, bias=False))
                part.add_module("norm", Norm(width))
            part.add_module("proj", Conv(width, wide, 1, bias=False))
            self.attn.add_module(name, part)
        self.attn.output = nn.Sequential()
        self.attn.output.add_module("proj", Conv(heads * depth, width, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = self.attn.query(y).unflatten(1, (self.heads, self.depth)).flatten(3).mT
        k, v = (part(y).flatten(2).mT[:, None] for part in (self.attn.key, self.attn.value))
        found = ((q @ k.mT) / self.depth**0.5).softmax(-1) @ v
        return x + self.layer_scale(self.attn.output(found.mT.flatten(1, 2).unflatten(2, x.shape[-2:])))


class Fusion(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ffn, self.norm = Inverted(width, WIDTH, 1, 0, 0, 2, added=False), Norm(WIDTH)

    def forward(self, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        made = self.ffn(torch.cat([high, F.interpolate(low, size=high.shape[-2:], mode="nearest")], dim=1))
        return self.norm(F.avg_pool2d(made, made.shape[-1] // COUNT))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = ConvNorm(3, 8, 3, 2, curve=True, bias=True)
        self.blocks = nn.Sequential(
            nn.Sequential(Edge(8, 16, 2), Edge(16, 16, 1)),
            nn.Sequential(Inverted(16, 24, 2, 3, 5, 3), Inverted(24, 24, 1, 5, 0, 2)),
            nn.Sequential(Inverted(24, 32, 2, 5, 5, 2), Inverted(32, 32, 1, 0, 0, 1), Attending(32, 3, 8, 2), Inverted(32, 32, 1, 0, 0, 2)),
            nn.Sequential(Inverted(32, 48, 2, 5, 5, 2), Attending(48, 4, 8, 1), Inverted(48, 48, 1, 0, 0, 2)))
        self.msfa = Fusion(32 + 48)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x, maps = self.conv_stem(x), []
        for stage in self.blocks:
            x = stage(x)
            maps.append(x)
        return self.msfa(*maps[-2:])

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@contextmanager
def wrapped() -> Iterator[None]:
    """Context in which transformers finds a timm whose only encoder is this one."""
    with patch.multiple(modeling_timm_wrapper, requires_backends=lambda *_: None,
                        _create_timm_model_with_error_handling=lambda config, num_classes, **args: MobileNet()):
        yield
