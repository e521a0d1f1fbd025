"""A Llama in plain PyTorch: the measure of what one training step costs at least.

It imports only torch and shares no code with the package: `torch.nn.Linear`, `torch.nn.RMSNorm`, scaled dot
product attention, cross entropy and fused AdamW, as a careful user would write them. `make bench` trains it
and one rank of the package in turn, on the same shape, and prints both times.

Letters in shapes: B batch, S sequence, H hidden, N query heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class PlainLlamaShape:
    """Sizes of the model; the defaults are the shape of the step cost that `make bench` reports."""

    num_layers: int = 6
    hidden_size: int = 256
    ffn_hidden_size: int = 704
    num_attention_heads: int = 8
    num_query_groups: int = 8
    kv_channels: int = 32
    seq_length: int = 256
    vocab_size: int = 4096
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    init_method_std: float = 0.02


class PlainAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: PlainLlamaShape) -> None:
        super().__init__()
        self.head_size = shape.kv_channels
        self.query = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.kv_channels, bias=False)
        self.key = nn.Linear(shape.hidden_size, shape.num_query_groups * shape.kv_channels, bias=False)
        self.value = nn.Linear(shape.hidden_size, shape.num_query_groups * shape.kv_channels, bias=False)
        self.output = nn.Linear(shape.num_attention_heads * shape.kv_channels, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, sequence, _ = x.shape  # [B, S, H]
        q, k, v = (  # [B, N, S, D], [B, G, S, D] twice
            projection(x).view(batch, sequence, -1, self.head_size).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        out = functional.scaled_dot_product_attention(
            rotate(q, cosine, sine),
            rotate(k, cosine, sine),
            v,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return self.output(out.transpose(1, 2).reshape(batch, sequence, -1))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves of a head paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class PlainLayer(nn.Module):
    """Attention and SwiGLU MLP, each behind an RMSNorm and with a residual."""

    def __init__(self, shape: PlainLlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.attention = PlainAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.gate = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class PlainLlama(nn.Module):
    """Tokens and labels in, mean loss out."""

    def __init__(self, shape: PlainLlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=shape.init_method_std)
        exponents = torch.arange(0, shape.kv_channels, 2, dtype=torch.float32) / shape.kv_channels
        positions = torch.arange(shape.seq_length).float()
        angles = torch.outer(positions, shape.rotary_base**-exponents).repeat(1, 2)  # [S, D]
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.norm(x))  # [B, S, V]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainTrainer:
    """The model with fused AdamW, decay on matrices only, and clipping at norm 1."""

    def __init__(self, shape: PlainLlamaShape, lr: float = 3e-4, clip_grad: float = 1.0) -> None:
        self.model = PlainLlama(shape)
        self.clip_grad = clip_grad
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=lr, betas=(0.9, 0.95), fused=True,
        )  # fmt: skip

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step on tokens and labels [B, S]; returns the mean loss (nats per token)."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    """Print the time of a step of the default shape, one thread, batch of 4."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shape = PlainLlamaShape()
    trainer = PlainTrainer(shape)
    sample = torch.randint(shape.vocab_size, (4, shape.seq_length + 1))
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        loss = trainer.step(sample[:, :-1], sample[:, 1:])
        seconds.append(time.perf_counter() - start)
    print(f"plain Llama: {sorted(seconds)[len(seconds) // 2]:.4f} s a step (median of 8), loss {loss:.3f}")


if __name__ == "__main__":
    main()
