"""Small real models whose attention can be swapped: a GPT, a BERT, a long-range classifier and a video-DiT block.

``attend(q, k, v, causal)`` takes and returns [B, H, N, D]. Sizes are arguments, so that the same code is a test on a
laptop and the documents' table on a GPU. torch is imported by the caller's choice of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Any, Any, Any, bool], Any]


@dataclass(frozen=True)
class Size:
    """Layers, width, heads, sequence length, batch and vocabulary (or classes)."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 256


SIZES = {
    "gpt2-small": Size(12, 768, 12, 1024, 4),
    "bert-large": Size(24, 1024, 16, 512, 4),
    "lra": Size(4, 256, 4, 4096, 8),
    "dit": Size(4, 1152, 16, 4096, 1),
    "tiny": Size(2, 64, 4, 128, 2),
}
# the same models in minutes on a laptop's processor
SMALL = {
    "gpt2-small": Size(3, 128, 4, 256, 4),
    "bert-large": Size(3, 128, 4, 256, 4),
    "lra": Size(2, 64, 4, 512, 4),
    "dit": Size(2, 96, 4, 512, 2),
    "tiny": Size(2, 32, 2, 64, 2),
}


def eager(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """softmax(q k^T) v, all of it in memory."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(future, -torch.inf)
    return torch.softmax(s.float(), dim=-1).to(v.dtype) @ v


def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """torch's own choice."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def ours(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """attnproof, whatever backend it chooses."""
    from ..api import attention

    return attention(q, k, v, causal=causal)


ATTENTION: dict[str, Attend] = {"eager": eager, "sdpa": sdpa, "attnproof": ours}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size, attend: Attend, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.attend, self.causal = size.heads, attend, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, width] -> [B, N, width]."""
        batch, length, width = x.shape
        rows = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v, self.causal).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(mixed)
        return x + self.mlp(self.norm_2(x))


class Sequence(nn.Module):
    """Token and position embeddings, blocks, and one prediction per token."""

    def __init__(self, size: Size, attend: Attend, *, causal: bool, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size, attend, causal=causal) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, N] -> [B, N, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Denoiser(nn.Module):
    """A video-DiT-like stack: patches of a noisy clip in, the noise out; bidirectional and long."""

    def __init__(self, size: Size, attend: Attend, *, channels: int = 16, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Linear(channels, size.width)
        self.positions = nn.Parameter(torch.randn(1, size.length, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size, attend, causal=False) for _ in range(size.layers))
        self.head = nn.Linear(size.width, channels)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[B, N, channels] -> [B, N, channels]."""
        x = self.embed(patches) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def build(name: str, size: Size, attend: Attend, *, recompute: bool = False) -> nn.Module:
    """The model of this name at this size."""
    if name == "dit":
        return Denoiser(size, attend, recompute=recompute)
    return Sequence(size, attend, causal=name in ("gpt2-small", "tiny"), recompute=recompute)
