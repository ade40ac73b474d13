"""The GPT that every module parallelises: decoder-only, pre-norm, small enough to read at one sitting.

Given code: students import it and do not change it. Shapes: B sequences, T tokens, D = width, H heads, V = vocab_size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        vocab_size: V, number of different tokens; 256 for bytes.
        context_length: longest sequence, tokens.
        width: D, size of the residual stream; a multiple of `heads`.
        heads: H, attention heads.
        layers: number of blocks.
        expansion: the MLP's hidden size is expansion * width.
        tied: whether the head uses the token embedding's weight.
    """

    vocab_size: int = 256
    context_length: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    expansion: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Attention(nn.Module):
    """Causal self-attention with separate query, key, value and output projections."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.o = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(project(x)) for project in (self.q, self.k, self.v))  # each B, H, T, D/H
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Widen, GELU, narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.expansion * config.width)
        self.down = nn.Linear(config.expansion * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised copy of the stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, logits out; with targets, also the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token at every position.

        Args:
            tokens: int64, shape (B, T), T at most context_length.

        Returns:
            Shape (B, T, V).
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over all B * T positions, in nats; `targets` has the shape of `tokens`."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def count_parameters(config: GPTConfig) -> int:
    """Number of parameters, by formula; a tied weight counts once.

    V·D (tokens) + T·D (positions) + layers·(4·(D² + D) attention + (2·e·D² + e·D + D) MLP + 4·D norms) + 2·D (last
    norm) + V·D (head, unless tied).
    """
    d, e = config.width, config.expansion
    block = 4 * (d * d + d) + (2 * e * d * d + e * d + d) + 4 * d
    embeddings = (config.vocab_size + config.context_length) * d
    return embeddings + config.layers * block + 2 * d + (0 if config.tied else config.vocab_size * d)


def flops_per_token(config: GPTConfig, sequence_length: int | None = None) -> int:
    """Floating-point operations of forward and backward for one token of a sequence.

    A multiplication by a weight matrix is 2 operations per weight forward and twice that backward: 6 in all. Attention
    adds 2·T·D for the scores and 2·T·D for mixing the values, per layer, times 3 (the causal half is not subtracted).
    """
    t = sequence_length or config.context_length
    d = config.width
    weights = config.layers * (4 * d * d + 2 * config.expansion * d * d) + config.vocab_size * d
    return 6 * weights + 3 * config.layers * 4 * t * d


def tiny(dtype: torch.dtype = torch.float64, **sizes: object) -> GPT:
    """A GPT for tests and demonstrations: two layers of width 32 on 32 tokens of context, in float64."""
    small = {"vocab_size": 64, "context_length": 32, "width": 32, "heads": 4, "layers": 2}
    return GPT(GPTConfig(**(small | sizes))).to(dtype)
