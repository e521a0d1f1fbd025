"""EDiT written out in plain PyTorch: R unsharded Llamas in one process, one AdamW each, the sync as loops.

An independent reference for the tests. It imports torch and the standard library only and shares no code with
the package. It favours being checkable by eye over speed: no batching over replicas or modules, statistics
recomputed from their definition. Formulas: arXiv 2412.07210; what that leaves open is decided as the package
documents it.

Parameters are dictionaries under megatron-core's names and layouts of an unsharded model, [out, in].
L = decoder.layers.{i}; D = size of a head; P = query heads of a group of G, which share a key and a value.

    embedding.word_embeddings.weight     [V, H]
    L.input_layernorm.weight             [H]
    L.self_attention.linear_qkv.weight   [G (P + 2) D, H]: for each group its query heads, its key, its value
    L.self_attention.linear_proj.weight  [H, G P D]
    L.pre_mlp_layernorm.weight           [H]
    L.mlp.linear_fc1.weight              [2 F, H]: gate, then up
    L.mlp.linear_fc2.weight              [H, F]
    decoder.final_layernorm.weight       [H]
    output_layer.weight                  [V, H], absent when tied to the embedding
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Parameters = dict[str, Tensor]
Batch = Mapping[str, Tensor]  # tokens, labels [B, S] int64; loss_mask [B, S]: 1 where the token counts
# spoil(iteration, replica, parameters, anchor): may change parameters in place, between a step and a sync
Spoil = Callable[[int, int, Parameters, Parameters | None], None]

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"


# ---- the model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaShape:
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    head_size: int
    tied: bool = False
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter, in forward order."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * self.head_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"decoder.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[layer + "self_attention.linear_qkv.weight"] = (qkv, hidden)
            shapes[layer + "self_attention.linear_proj.weight"] = (
                hidden,
                self.num_attention_heads * self.head_size,
            )
            shapes[layer + "pre_mlp_layernorm.weight"] = (hidden,)
            shapes[layer + "mlp.linear_fc1.weight"] = (2 * ffn, hidden)
            shapes[layer + "mlp.linear_fc2.weight"] = (hidden, ffn)
        shapes[FINAL_NORM] = (hidden,)
        if not self.tied:
            shapes[OUTPUT] = (self.vocab_size, hidden)
        return shapes

    def modules(self) -> dict[str, list[str]]:
        """The units of the sync, in forward order, and the parameters of each: embedding, layers, head.

        A tied matrix belongs to the embedding; the head is then the final norm alone.
        """
        modules = {"embedding": [EMBEDDING]}
        for i in range(self.num_layers):
            prefix = f"decoder.layers.{i}."
            modules[f"layer {i}"] = [name for name in self.parameter_shapes() if name.startswith(prefix)]
        modules["head"] = [FINAL_NORM] if self.tied else [FINAL_NORM, OUTPUT]
        return modules


class PlainLlama:
    """Llama as a function of its parameters: RMSNorm, SwiGLU, rotary positions (halves, not interleaved),
    grouped queries, no biases, no dropout."""

    def __init__(self, shape: LlamaShape, parameters: Parameters) -> None:
        expected = shape.parameter_shapes()
        found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        assert found == expected, f"parameters differ in {dict(found.items() ^ expected.items())}"
        self.shape, self.parameters = shape, parameters

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, V]."""
        p, shape = self.parameters, self.shape
        x = p[EMBEDDING][tokens]  # [B, S, H]
        for i in range(shape.num_layers):
            layer = f"decoder.layers.{i}."
            normed = self._norm(x, layer + "input_layernorm.weight")
            x = x + self._attention(normed, layer + "self_attention.")
            normed = self._norm(x, layer + "pre_mlp_layernorm.weight")
            x = x + self._mlp(normed, layer + "mlp.")
        return self._norm(x, FINAL_NORM) @ p[EMBEDDING if shape.tied else OUTPUT].T

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the token losses that count, 0-d."""
        return self.loss_sums(batch)[0]

    def loss_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sums over the tokens that count: of the losses, and of logsumexp(logits)^2 (0-d each)."""
        logits = self.logits(batch["tokens"])
        losses = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        squares = logits.exp().sum(-1).log().pow(2).flatten()
        mask = batch["loss_mask"].flatten()
        return (losses * mask).sum(), (squares * mask).sum()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.shape.norm_epsilon) * self.parameters[name]

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (x @ self.parameters[prefix + "linear_fc1.weight"].T).chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.parameters[prefix + "linear_fc2.weight"].T

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        shape = self.shape
        groups, size = shape.num_query_groups, shape.head_size
        per_group = shape.num_attention_heads // groups
        batch, length, _ = x.shape
        qkv = x @ self.parameters[prefix + "linear_qkv.weight"].T
        qkv = qkv.view(batch, length, groups, per_group + 2, size)
        qkv = qkv.permute(0, 2, 3, 1, 4)  # [B, G, P + 2, S, D]
        query = self._rotate(qkv[:, :, :per_group])  # [B, G, P, S, D]
        key = self._rotate(qkv[:, :, per_group : per_group + 1])  # [B, G, 1, S, D]
        value = qkv[:, :, per_group + 1 :]  # [B, G, 1, S, D]
        scores = query @ key.transpose(-1, -2) / math.sqrt(size)  # [B, G, P, S, S]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, -torch.inf).softmax(-1) @ value  # [B, G, P, S, D]
        context = context.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)  # [B, S, G P D]
        return context @ self.parameters[prefix + "linear_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Turns the pair (x[d], x[d + D/2]) at position s by the angle s / base^(2d/D); x [..., S, D]."""
        length, size = x.shape[-2:]
        frequencies = self.shape.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # [S, D/2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ---- training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSettings:
    """Inner and outer optimizer, and the sync. Interval and warm-up in iterations."""

    sync_interval: int
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; vectors are not decayed
    clip_grad: float = 1.0  # 0 = off
    z_loss_coeff: float = 0.0  # c of the loss + c logsumexp(logits)^2 of each token
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    pseudo_grad_clip: float = 10.0  # 0 = off
    anomaly_threshold: float = 3.0  # 0 = off
    anomaly_alpha: float = 0.02
    anomaly_warmup_syncs: int = 20
    weighting: str = "softmax"
    softmax_temperature: float = 1.0


@dataclass
class IterationRecord:
    """Of each replica: mean loss of its tokens, gradient norm before clipping, whether it was updated."""

    losses: list[float]
    grad_norms: list[float]
    updated: list[bool]


@dataclass
class SyncRecord:
    """One sync of R replicas and M modules, these in the order of `LlamaShape.modules`."""

    iteration: int
    norms: Tensor  # float64 [R, M]
    flagged: Tensor  # bool [R, M], by the detector
    left_out: Tensor  # bool [R, M]: flagged, non-finite, or without a step
    weights: Tensor  # float64 [R, M]
    betas: Tensor  # float64 [M], 1 where rolled back
    rolled_back: Tensor  # bool [M]
    local_parameters: list[Parameters]  # [replica], before the sync
    parameters: list[Parameters]  # [replica], after it: the anchor
    outer_momentum: Parameters  # after it


@dataclass
class RunResult:
    iterations: list[IterationRecord]
    syncs: list[SyncRecord]
    parameters: list[Parameters]  # [replica], at the end; a sync is made only where one is due
    anchor: Parameters | None  # None: still in warm-up
    moments: list[dict[str, tuple[Tensor, Tensor]]]  # [replica], first and second, at the end


class Replica:
    def __init__(self, shape: LlamaShape, initial: Parameters, settings: RunSettings) -> None:
        self.parameters = {name: tensor.clone().requires_grad_() for name, tensor in initial.items()}
        self.model = PlainLlama(shape, self.parameters)
        matrices = [p for p in self.parameters.values() if p.dim() == 2]
        vectors = [p for p in self.parameters.values() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.eps,
        )
        self.steps_since_sync = 0
        self.z_loss_coeff = settings.z_loss_coeff

    def gradient_sums(self, batch: Batch) -> tuple[float, float, Parameters]:
        """Sum of the losses that count, how many, and the gradient of that sum with the z-losses."""
        loss, squares = self.model.loss_sums(batch)
        gradients = torch.autograd.grad(loss + self.z_loss_coeff * squares, list(self.parameters.values()))
        named = dict(zip(self.parameters, gradients, strict=True))
        return float(loss.detach()), float(batch["loss_mask"].sum()), named

    def step(self, gradient: Parameters, clip: float, learning_rate: float) -> float:
        """Clips the gradient by its norm, which it returns, and updates the parameters."""
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradient.values()))
        coefficient = clip / (norm + 1e-6) if clip > 0 else 1.0
        for name, parameter in self.parameters.items():
            parameter.grad = gradient[name] * coefficient if coefficient < 1.0 else gradient[name].clone()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.steps_since_sync += 1
        return norm


def run_edit(
    shape: LlamaShape,
    initial: Parameters,
    batches: Sequence[Sequence[Batch]],
    learning_rates: Sequence[float],
    settings: RunSettings,
    spoil: Spoil | None = None,
) -> RunResult:
    """Trains R replicas from the same initial parameters; batches [iteration][replica], iterations from 1.

    Micro-batches do not show: a gradient is the sum over the tokens of a batch divided by how many count.
    A step without any token that counts leaves the parameters alone and is none.
    """
    replicas = [Replica(shape, initial, settings) for _ in batches[0]]
    anchor: Parameters | None = None
    if settings.warmup_steps == 0:
        anchor = detached(replicas[0].parameters)
    momentum = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    detectors = {name: ModuleDetectors(len(replicas), settings) for name in shape.modules()}
    iterations, syncs = [], []
    for iteration, (batch_of, learning_rate) in enumerate(zip(batches, learning_rates, strict=True), 1):
        synchronous = iteration <= settings.warmup_steps
        iterations.append(iterate(replicas, batch_of, learning_rate, settings, synchronous))
        with torch.no_grad():
            for i, replica in enumerate(replicas):
                if spoil is not None:
                    spoil(iteration, i, replica.parameters, anchor)
            local_iterations = iteration - settings.warmup_steps
            if local_iterations == 0:
                anchor = detached(replicas[0].parameters)
                for replica in replicas:
                    replica.steps_since_sync = 0
            elif local_iterations > 0 and local_iterations % settings.sync_interval == 0:
                assert anchor is not None
                syncs.append(synchronise(iteration, shape.modules(), replicas, anchor, momentum, detectors, settings))
    return RunResult(
        iterations,
        syncs,
        [detached(replica.parameters) for replica in replicas],
        None if anchor is None else detached(anchor),
        [moments(replica) for replica in replicas],
    )


def iterate(
    replicas: list[Replica],
    batches: Sequence[Batch],
    learning_rate: float,
    settings: RunSettings,
    synchronous: bool,
) -> IterationRecord:
    """One step of each replica: on its own gradient, or (warm-up) on that of all tokens of all replicas."""
    sums = [replica.gradient_sums(batch) for replica, batch in zip(replicas, batches, strict=True)]
    record = IterationRecord([loss / max(count, 1) for loss, count, _ in sums], [], [])
    for i, replica in enumerate(replicas):
        shares = sums if synchronous else [sums[i]]
        tokens = sum(count for _, count, _ in shares)
        norm = 0.0
        if tokens > 0:
            names = replica.parameters
            gradient = {name: sum_of([g[name] for _, _, g in shares]) / tokens for name in names}
            norm = replica.step(gradient, settings.clip_grad, learning_rate)
        record.grad_norms.append(norm)
        record.updated.append(tokens > 0)
    return record


# ---- the sync ----------------------------------------------------------------------------------------------


def synchronise(
    iteration: int,
    modules: dict[str, list[str]],
    replicas: list[Replica],
    anchor: Parameters,
    momentum: Parameters,
    detectors: dict[str, ModuleDetectors],
    settings: RunSettings,
) -> SyncRecord:
    """Updates anchor, momentum, detectors and every replica's parameters in place."""
    local_parameters = [detached(replica.parameters) for replica in replicas]
    rows: list[tuple[list[float], list[bool], list[bool], list[float], float]] = []  # one a module
    stepped = [replica.steps_since_sync > 0 for replica in replicas]
    for module, names in modules.items():
        # how far each replica went, and who takes part
        deltas = [{name: replica.parameters[name] - anchor[name] for name in names} for replica in replicas]
        norms = [norm_of(delta) for delta in deltas]
        flagged = detectors[module].flag(norms, stepped)
        left_out = [flagged[i] or not math.isfinite(norms[i]) or not stepped[i] for i in range(len(replicas))]
        remaining = [i for i in range(len(replicas)) if not left_out[i]]

        # w_i = exp(-G_i/T) / sum_j exp(-G_j/T), or equal weights
        weights, beta = [0.0] * len(replicas), 1.0
        if remaining:
            smallest = min(norms[i] for i in remaining)
            for i in remaining:
                exponent = (smallest - norms[i]) / settings.softmax_temperature
                weights[i] = math.exp(exponent) if settings.weighting == "softmax" else 1.0
            weights = [weight / sum(weights) for weight in weights]

            # Dbar = sum_i w_i Delta_i ; beta = min(phi / (||Dbar|| + eps), 1)
            average = {name: sum_of([weights[i] * deltas[i][name] for i in remaining]) for name in names}
            if settings.pseudo_grad_clip > 0:
                beta = min(settings.pseudo_grad_clip / (norm_of(average) + 1e-6), 1.0)

            # g = -beta Dbar ; m <- mu m + g ; theta <- theta - eta (g + mu m)
            for name in names:
                g = -beta * average[name]
                momentum[name] = settings.outer_momentum * momentum[name] + g
                step = g + settings.outer_momentum * momentum[name]
                anchor[name] = anchor[name] - settings.outer_lr * step

        # everyone goes on from the anchor; with nobody remaining it is the old one: a rollback
        for i, replica in enumerate(replicas):
            for name in names:
                replica.parameters[name].copy_(anchor[name])
                state = replica.optimizer.state.get(replica.parameters[name])
                if state and not math.isfinite(norms[i]):
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()

        rows.append((norms, flagged, left_out, weights, beta))
    for replica in replicas:
        replica.steps_since_sync = 0
    all_norms, all_flagged, all_left_out, all_weights, betas = zip(*rows, strict=True)
    return SyncRecord(
        iteration,
        norms=torch.tensor(all_norms, dtype=torch.float64).T,
        flagged=torch.tensor(all_flagged).T,
        left_out=torch.tensor(all_left_out).T,
        weights=torch.tensor(all_weights, dtype=torch.float64).T,
        betas=torch.tensor(betas, dtype=torch.float64),
        rolled_back=torch.tensor(all_left_out).all(dim=1),
        local_parameters=local_parameters,
        parameters=[detached(replica.parameters) for replica in replicas],
        outer_momentum=detached(momentum),
    )


class ModuleDetectors:
    """The detectors of one module: for each replica the norms that were accepted, from which mean and
    variance are computed anew each time. The k-th last of them weighs in proportion to (1 - alpha)^(k - 1)."""

    def __init__(self, num_replicas: int, settings: RunSettings) -> None:
        self.settings = settings
        self.accepted: list[list[float]] = [[] for _ in range(num_replicas)]
        self.majorities = 0  # syncs in a row in which more than half of the replicas were flagged

    def flag(self, norms: list[float], stepped: list[bool]) -> list[bool]:
        """Which replicas are far above their own past; the others' norms become part of it."""
        flagged = []
        for norm, history, made_steps in zip(norms, self.accepted, stepped, strict=True):
            usable = made_steps and math.isfinite(norm)
            flagged.append(usable and self._is_anomaly(norm, history))
            if usable and not flagged[-1]:
                history.append(norm)
        self.majorities = self.majorities + 1 if sum(flagged) > len(flagged) / 2 else 0
        if self.majorities == 3:
            self.majorities, self.accepted = 0, [[] for _ in flagged]
        return flagged

    def _is_anomaly(self, norm: float, history: list[float]) -> bool:
        delta = self.settings.anomaly_threshold
        if delta == 0 or len(history) < self.settings.anomaly_warmup_syncs:
            return False
        raw = [(1 - self.settings.anomaly_alpha) ** age for age in reversed(range(len(history)))]
        shares = [weight / sum(raw) for weight in raw]
        mean = sum(share * g for share, g in zip(shares, history, strict=True))
        squares = sum(share**2 for share in shares)  # 1 / squares: as many observations as these are worth
        variance = sum(share * (g - mean) ** 2 for share, g in zip(shares, history, strict=True))
        variance /= 1 - squares  # unbiased
        scale = max(math.sqrt(variance * (1 + squares)), 1e-3 * mean)
        dof = 1 / squares - 1
        threshold = delta + (delta**3 + delta) / (4 * dof)
        threshold += (5 * delta**5 + 16 * delta**3 + 3 * delta) / (96 * dof**2)
        return norm > mean + threshold * scale


def norm_of(tensors: Parameters) -> float:
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))


def sum_of(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def detached(parameters: Parameters) -> Parameters:
    return {name: tensor.detach().clone() for name, tensor in parameters.items()}


def moments(replica: Replica) -> dict[str, tuple[Tensor, Tensor]]:
    """First and second moments of one replica's AdamW; empty before its first step."""
    found = {}
    for name, parameter in replica.parameters.items():
        state = replica.optimizer.state.get(parameter)
        if state:
            found[name] = (state["exp_avg"].clone(), state["exp_avg_sq"].clone())
    return found
