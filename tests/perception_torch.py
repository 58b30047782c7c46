"""The Perception Encoder in torch for tests: written from its paper, under timm's tensor names.

transformers takes Perception LM's encoder from timm, which tests should not require; `fastvit_torch.wrapped` substitutes this one.
`benchmarks/timm_encoders.py` with --perception compares ours with timm's at its published size.
"""

import torch
from torch import nn
from torch.nn import functional as F

ARGS = {"embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 1.5, "patch_size": 8, "img_size": [32, 32], "global_pool": "",
        "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": [4, 4]}


class Attention(nn.Module):
    """`turn`: the rotated tokens' angles by position; tokens before the patches are not rotated."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        tiles, count, width = x.shape
        q, k, v = self.qkv(x).reshape(tiles, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        lead = count - len(angles)
        q, k = (torch.cat([each[:, :, :lead], turned(each[:, :, lead:], angles)], 2) for each in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tiles, count, width))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs, [..., n, d] by angles [n, d / 2]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).reshape(x.shape)


class Ffn(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, scaled: float | None):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-5), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-5), Ffn(width, inner)
        self.gamma_1, self.gamma_2 = (None if scaled is None else nn.Parameter(torch.full((width,), scaled)) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        one = self.attn(self.norm1(x), angles)
        x = x + (one if self.gamma_1 is None else self.gamma_1 * one)
        two = self.mlp(self.norm2(x))
        return x + (two if self.gamma_2 is None else self.gamma_2 * two)


class PerceptionEncoder(nn.Module):
    """`class_token`: of the architecture that stands for the large ones, which count places from one, and not of the gigantic ones."""

    def __init__(self, architecture: str, embed_dim: int, depth: int, num_heads: int, mlp_ratio: float, patch_size: int,
                 img_size: list[int], ref_feat_shape: list[int], init_values: float | None = None, use_post_transformer_norm: bool = True,
                 **rest: object):
        super().__init__()
        self.first = int("large" in architecture)
        self.across, self.reference, self.head = img_size[0] // patch_size, ref_feat_shape[0], embed_dim // num_heads
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, embed_dim, patch_size, patch_size, bias=False)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.1) if self.first else None
        self.pos_embed = nn.Parameter(torch.randn(1, self.across**2 + self.first, embed_dim) * 0.1)
        self.norm_pre = nn.LayerNorm(embed_dim, eps=1e-5)
        self.blocks = nn.ModuleList(Layer(embed_dim, num_heads, int(embed_dim * mlp_ratio), init_values) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-5) if use_post_transformer_norm else None

    def angles(self) -> torch.Tensor:
        places = (torch.arange(self.across) + float(self.first)) / self.across * self.reference
        steps = 10_000.0 ** -(torch.arange(self.head // 4) / (self.head // 4))
        columns, rows = places.repeat(self.across), places.repeat_interleave(self.across)
        return torch.cat([columns[:, None] * steps, rows[:, None] * steps], 1)

    def forward_features(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x, angles = self.norm_pre(x + self.pos_embed), self.angles()
        for block in self.blocks:
            x = block(x, angles)
        return x if self.norm is None else self.norm(x)

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        return x
