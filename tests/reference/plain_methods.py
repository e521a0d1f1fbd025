"""Every method of the package written out in plain PyTorch, on the model and the detectors of `plain_edit`.

An independent reference for the tests. It imports torch, the standard library, `plain_edit` and `plain_reducers` only
and shares no code with the package; it favours being checkable by eye over speed. R unsharded replicas in one process,
one module of the model after the other, each module one flat vector in the sync.

What all methods share: a replica that is non-finite in a module, or made no step since the module's last sync, is
left out of that module's average, and takes the result like the others. With a non-finite one its inner moments of the
module are zeroed. Where all are left out, the anchor stays as it is and all go on from it. A step whose gradient is
not finite is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.plain_edit import (
    Batch,
    IterationRecord,
    LlamaShape,
    ModuleDetectors,
    Parameters,
    Replica,
    RunResult,
    RunSettings,
    Spoil,
    SyncRecord,
    detached,
    iterate,
    moments,
    sum_of,
)
from tests.reference.plain_reducers import agreeing_average, compressed_sum, sparse

OUTER_STEP = {
    "post-local-sgd": "none",
    "slowmo": "slowmo",
    "diloco": "nesterov",
    "co2": "co2",
    "co2-sharded": "co2",
    "edit": "nesterov",
    "a-edit": "nesterov",
    "streaming": "nesterov",
}


@dataclass(frozen=True)
class MethodSettings(RunSettings):
    """`RunSettings` (interval, inner optimizer, outer rates, penalty) and what the other methods add.

    outer_lr, outer_momentum  eta and mu; slowmo's a and beta; co2's eta and beta
    steps_of_intervals        a-edit: [interval][replica], local steps from one sync to the next
    last_interval_is_open     a-edit: the last of these does not end in a sync
    flat_order                names of all parameters; a module's vector is made of its own, in this order. It matters
                              to what looks at positions: compression and sparsification. None: as in the model
    padding                   (name, zeros that follow it in the vector); it matters to the same
    """

    method: str = "edit"
    sublayer: bool = False  # attention and MLP of a layer are two modules
    gap_penalty: float = 1.0  # co2: Lambda
    momentum_clip: float = 0.0  # co2: c, 0 = off
    num_fragments: int = 1  # streaming: F
    delay: int = 0  # streaming: D, steps
    mixing_alpha: float | None = None  # streaming with a delay; None: local progress is kept
    steps_of_intervals: tuple[tuple[int, ...], ...] = ()
    last_interval_is_open: bool = False
    step_weight_ratio: float = 0.5  # a-edit: r
    min_total_steps: int = 0  # a-edit: with fewer steps of all replicas together, a sync is put off
    consensus: str = "none"  # none, sum, count
    sparsity: float = 0.0  # share of the elements that is dropped, the smallest
    comm_dtype: str = "fp32"  # fp32, bf16, int8, int4
    average_moments_every: int = 0  # syncs of a module; 0: inner moments are never averaged
    flat_order: tuple[str, ...] | None = None
    padding: tuple[tuple[str, int], ...] = ()


@dataclass
class MethodSyncRecord(SyncRecord):
    """Columns of modules that were not due hold zeros and False. `betas` are filled in when the sync is applied."""

    due: Tensor = field(default_factory=lambda: torch.empty(0))  # bool [M]
    steps: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [R, M], since the module's last sync
    iterations: list[int] = field(default_factory=list)  # [replica], steps that it had made; a-edit: they differ


@dataclass
class MethodResult(RunResult):
    outer_momentum: Parameters  # at the end; after the last sync record's where something was applied later
    in_flight: list[int]  # indices of the syncs that were launched and not yet applied


@dataclass
class Launch:
    """One module's average on its way: everything that is known when it is launched."""

    record: MethodSyncRecord
    column: int
    left_out: list[bool]
    average: Tensor | None  # Dbar [n], None: all were left out
    local_vectors: list[Tensor]  # [replica], [n] at the launch
    learning_rate: float  # of the step before it
    iteration: int


class CarefulReplica(Replica):
    """Leaves everything alone when the gradient is not finite."""

    def step(self, gradient: Parameters, clip: float, learning_rate: float) -> float:
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradient.values()))
        return super().step(gradient, clip, learning_rate) if math.isfinite(norm) else norm


class AllNonFiniteError(Exception):
    """Without an anchor there is nothing to go back to."""


class MethodRun:
    """All state of R replicas. `run_method` drives it."""

    def __init__(self, shape: LlamaShape, initial: Parameters, num_replicas: int, settings: MethodSettings) -> None:
        self.settings, self.has_anchor = settings, OUTER_STEP[settings.method] != "none"
        assert not (settings.average_moments_every and (settings.delay or "co2" in settings.method)), "not together"
        self.replicas = [CarefulReplica(shape, initial, settings) for _ in range(num_replicas)]
        self.modules = modules_of(shape, settings)
        self.padding = dict(settings.padding)
        self.anchor: Parameters | None = None
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
        self.detectors = {module: ModuleDetectors(num_replicas, settings) for module in self.modules}
        self.steps_since = {module: [0] * num_replicas for module in self.modules}
        self.made = [0] * num_replicas  # steps (iterations) of each replica
        self.in_flight: dict[str, Launch] = {}
        self.syncs_of = dict.fromkeys(self.modules, 0)  # applied ones
        self.errors: dict[str, list[Tensor]] = {}  # compression: [replica], [n] of each module
        self.iterations: list[IterationRecord] = []
        self.syncs: list[MethodSyncRecord] = []
        self.learning_rate = 0.0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def set_anchor(self) -> None:
        if self.has_anchor:
            self.anchor = detached(self.replicas[0].parameters)
        for module in self.modules:
            self.steps_since[module] = [0] * len(self.replicas)

    def step_together(self, batches: Sequence[Batch], learning_rate: float, synchronous: bool) -> None:
        """One step of every replica."""
        record = iterate(self.replicas, batches, learning_rate, self.settings, synchronous)
        self.iterations.append(record)
        for i in range(len(self.replicas)):
            record.updated[i] &= math.isfinite(record.grad_norms[i])
            self._count(i, record.updated[i])
        self.learning_rate = learning_rate

    def step_alone(self, i: int, batch: Batch, learning_rate: float) -> None:
        """One local step of replica i, its record in the row of its own iteration."""
        alone = iterate([self.replicas[i]], [batch], learning_rate, self.settings, synchronous=False)
        if self.made[i] == len(self.iterations):
            nothing = len(self.replicas)
            self.iterations.append(IterationRecord([math.nan] * nothing, [math.nan] * nothing, [False] * nothing))
        row = self.iterations[self.made[i]]
        updated = alone.updated[0] and math.isfinite(alone.grad_norms[0])
        row.losses[i], row.grad_norms[i], row.updated[i] = alone.losses[0], alone.grad_norms[0], updated
        self._count(i, updated)
        self.learning_rate = learning_rate

    def _count(self, i: int, updated: bool) -> None:
        self.made[i] += 1
        for counts in self.steps_since.values():
            counts[i] += int(updated)

    def spoil(self, i: int, spoil: Spoil | None) -> None:
        if spoil is not None:
            with torch.no_grad():
                spoil(self.made[i], i, self.replicas[i].parameters, self.anchor)

    # ---- syncs -------------------------------------------------------------------------------------------------------

    def sync_after_step(self, local_step: int) -> None:
        """What methods by steps do after local step s = 1, 2, ..., counted from the end of the warm-up."""
        due = self.due_after(local_step)
        record = self.new_record(due) if due else None
        for module, launch in list(self.in_flight.items()):
            if self.settings.method == "streaming" and local_step == launch.iteration + self.settings.delay:
                self.apply(module, self.in_flight.pop(module))
        if record is not None:
            self.sync(due, record, local_step)

    def due_after(self, local_step: int) -> list[str]:
        """Module j of M is in fragment f = floor(j F / M); that is due where s mod tau = floor(f tau / F)."""
        tau, fragments = self.settings.sync_interval, self.settings.num_fragments
        if self.settings.method != "streaming":
            return list(self.modules) if local_step % tau == 0 else []
        numbered = enumerate(self.modules)
        fragment_of = {module: j * fragments // len(self.modules) for j, module in numbered}
        return [module for module, f in fragment_of.items() if local_step % tau == f * tau // fragments]

    def sync(self, due: list[str], record: MethodSyncRecord, local_step: int = 0) -> None:
        """Launches the modules that are due, and applies what is to be applied now."""
        for module in due:
            launch = self.launch(module, record, local_step)
            if self.settings.method in ("co2", "co2-sharded"):
                # D_k was taken from the anchor that round k began with; only now does that move, by D_{k-1}.
                previous, self.in_flight[module] = self.in_flight.get(module), launch
                self.apply(module, launch if previous is None else previous, update=previous is not None)
            elif self.settings.method == "streaming" and self.settings.delay > 0:
                self.in_flight[module] = launch
            else:
                self.apply(module, launch)
        self.finish(record)

    def launch(self, module: str, record: MethodSyncRecord, local_step: int) -> Launch:
        """Norms, who takes part, weights, and the average."""
        settings, names = self.settings, self.modules[module]
        vectors = [self.vector(replica.parameters, names) for replica in self.replicas]
        # Without an anchor the parameters themselves are averaged: their distance from 0.
        anchor = self.vector(self.anchor, names) if self.anchor is not None else torch.zeros_like(vectors[0])
        deltas = [vector - anchor for vector in vectors]  # [replica], [n]
        norms = [float(delta.double().norm()) for delta in deltas]
        steps = self.steps_since[module]
        stepped = [count > 0 for count in steps]
        seen = norms
        if settings.method == "a-edit":
            seen = [norm / math.sqrt(max(count, 1)) for norm, count in zip(norms, steps, strict=True)]
        flagged = self.detectors[module].flag(seen, stepped)
        left_out = [f or not s or not math.isfinite(g) for f, s, g in zip(flagged, stepped, norms, strict=True)]
        weights = self.weights(norms, left_out, steps)
        average = None
        if not all(left_out):
            average = self.average(module, deltas, weights)
        elif self.anchor is None and not all(map(math.isfinite, norms)):
            raise AllNonFiniteError(module)

        m = list(self.modules).index(module)
        columns = (record.norms, record.flagged, record.left_out, record.weights, record.steps)
        for table, column in zip(columns, (norms, flagged, left_out, weights, steps), strict=True):
            table[:, m] = torch.tensor(column)
        record.rolled_back[m] = all(left_out)
        self.steps_since[module] = [0] * len(self.replicas)
        self.zero_moments(names, [not math.isfinite(norm) for norm in norms])
        return Launch(record, m, left_out, average, vectors, self.learning_rate, local_step)

    def weights(self, norms: list[float], left_out: list[bool], steps: list[int]) -> list[float]:
        """Softmax of -G/T or equal, over those who remain; a-edit: (1 - r) times that plus r times shares of steps."""
        remaining = [i for i in range(len(norms)) if not left_out[i]]
        weights = [0.0] * len(norms)
        for i in remaining:
            exponent = (min(norms[j] for j in remaining) - norms[i]) / self.settings.softmax_temperature
            weights[i] = math.exp(exponent) if self.settings.weighting == "softmax" else 1.0
        if remaining:
            weights = [weight / sum(weights) for weight in weights]
        if self.settings.method == "a-edit":
            r, total = self.settings.step_weight_ratio, sum(steps[i] for i in remaining)
            for i in remaining:
                weights[i] = (1 - r) * weights[i] + r * steps[i] / total
        return weights

    def average(self, module: str, deltas: list[Tensor], weights: list[float]) -> Tensor:
        """sum_i w_i Delta_i over those with a weight, with sparsification, sign consensus or compression."""
        settings = self.settings
        taking_part = [i for i in range(len(deltas)) if weights[i] > 0]
        if settings.sparsity > 0:
            deltas = [sparse(delta, settings.sparsity) for delta in deltas]
        if settings.consensus != "none":
            assert settings.comm_dtype == "fp32", "not together"
            return agreeing_average(
                [deltas[i] for i in taking_part], [weights[i] for i in taking_part], settings.consensus
            )
        contributions = [weights[i] * deltas[i] if weights[i] > 0 else None for i in range(len(deltas))]
        if settings.comm_dtype == "fp32":
            return sum_of([contribution for contribution in contributions if contribution is not None])
        errors = self.errors.setdefault(module, [torch.zeros_like(deltas[0]) for _ in deltas])
        return compressed_sum(contributions, errors, settings.comm_dtype)

    def apply(self, module: str, launch: Launch, *, update: bool = True, flush: bool = False) -> None:
        """The outer step (unless `update` is False or all were left out), and what each replica goes on from.

        `flush`: without a delay, so that no progress was made since the launch.
        """
        settings, names = self.settings, self.modules[module]
        if self.anchor is None:
            new = launch.average if launch.average is not None else launch.local_vectors[0]
        else:
            if update and launch.average is not None:
                launch.record.betas[launch.column] = self.outer_step(names, launch.average, launch.learning_rate)
            new = self.vector(self.anchor, names)
        for i, replica in enumerate(self.replicas):
            now = self.vector(replica.parameters, names)
            if settings.delay == 0 or flush or launch.average is None or launch.left_out[i]:
                value = new
            elif settings.mixing_alpha is None:
                value = new + (now - launch.local_vectors[i])
            else:
                value = settings.mixing_alpha * now + (1 - settings.mixing_alpha) * new
            self.write(replica.parameters, names, value)
        self.syncs_of[module] += 1
        every = settings.average_moments_every
        if every and self.syncs_of[module] % every == 0 and launch.average is not None:
            self.average_moments(names, launch.left_out)

    def outer_step(self, names: list[str], average: Tensor, learning_rate: float) -> float:
        """Moves anchor and momentum by the averaged pseudo gradient; its clip coefficient beta."""
        assert self.anchor is not None
        settings, beta = self.settings, 1.0
        eta, mu = settings.outer_lr, settings.outer_momentum
        if settings.pseudo_grad_clip > 0:
            beta = min(settings.pseudo_grad_clip / (float(average.double().norm()) + 1e-6), 1.0)
        theta, m = self.vector(self.anchor, names), self.vector(self.momentum, names)
        g = -beta * average  # theta - mean of the replicas, for those without a penalty
        match OUTER_STEP[settings.method]:
            case "nesterov":
                m = mu * m + g
                theta = theta - eta * (g + mu * m)
            case "slowmo":
                m = mu * m + g / learning_rate
                theta = theta - eta * learning_rate * m
            case "co2":
                m = mu * m + g / settings.gap_penalty
                if settings.momentum_clip > 0:
                    m = m.clamp(-settings.momentum_clip, settings.momentum_clip)
                theta = theta - eta * m
        self.write(self.anchor, names, theta)
        self.write(self.momentum, names, m)
        return beta

    # ---- inner moments -----------------------------------------------------------------------------------------------

    def inner_states(self, name: str) -> list[dict[str, Tensor] | None]:
        """Adam's state of one parameter in each replica; None before its first step."""
        return [replica.optimizer.state.get(replica.parameters[name]) or None for replica in self.replicas]

    def zero_moments(self, names: list[str], non_finite: list[bool]) -> None:
        for name in names:
            for state, zero in zip(self.inner_states(name), non_finite, strict=True):
                if state is not None and zero:
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()

    def average_moments(self, names: list[str], left_out: list[bool]) -> None:
        """All take the mean over those that were not left out."""
        for name in names:
            states = self.inner_states(name)
            for key in ("exp_avg", "exp_avg_sq"):
                kept = [
                    state[key] for state, out in zip(states, left_out, strict=True) if not out and state is not None
                ]
                mean = sum_of(kept) / len(kept)
                for state in states:
                    if state is not None:
                        state[key].copy_(mean)

    # ---- vectors -----------------------------------------------------------------------------------------------------

    def vector(self, parameters: Parameters, names: list[str]) -> Tensor:
        """[n], a copy."""
        pieces = []
        for name in names:
            value = parameters[name].detach().flatten()
            pieces += [value, value.new_zeros(self.padding.get(name, 0))]
        return torch.cat(pieces)

    def write(self, parameters: Parameters, names: list[str], value: Tensor) -> None:
        start = 0
        for name in names:
            target = parameters[name].detach()
            target.copy_(value[start : start + target.numel()].view_as(target))
            start += target.numel() + self.padding.get(name, 0)

    def new_record(self, due: list[str]) -> MethodSyncRecord:
        """Filled in by `launch`; the local parameters are those of now."""
        size = (len(self.replicas), len(self.modules))
        return MethodSyncRecord(
            iteration=self.made[0],
            norms=torch.zeros(size, dtype=torch.float64),
            flagged=torch.zeros(size, dtype=torch.bool),
            left_out=torch.zeros(size, dtype=torch.bool),
            weights=torch.zeros(size, dtype=torch.float64),
            betas=torch.ones(size[1], dtype=torch.float64),
            rolled_back=torch.zeros(size[1], dtype=torch.bool),
            local_parameters=[detached(replica.parameters) for replica in self.replicas],
            parameters=[],
            outer_momentum={},
            due=torch.tensor([module in due for module in self.modules]),
            steps=torch.zeros(size, dtype=torch.int64),
            iterations=list(self.made),
        )

    def finish(self, record: MethodSyncRecord) -> None:
        record.parameters = [detached(replica.parameters) for replica in self.replicas]
        record.outer_momentum = detached(self.momentum)
        self.syncs.append(record)

    def result(self) -> MethodResult:
        return MethodResult(
            self.iterations,
            list(self.syncs),
            [detached(replica.parameters) for replica in self.replicas],
            None if self.anchor is None else detached(self.anchor),
            [moments(replica) for replica in self.replicas],
            detached(self.momentum),
            sorted(
                {k for k, sync in enumerate(self.syncs) for launch in self.in_flight.values() if launch.record is sync}
            ),
        )


def modules_of(shape: LlamaShape, settings: MethodSettings) -> dict[str, list[str]]:
    """Modules in forward order and their parameters in the order of the vector."""
    modules = {}
    for module, names in shape.modules().items():
        if settings.sublayer and module.startswith("layer "):
            attention = [name for name in names if "self_attention" in name or "input_layernorm" in name]
            modules[f"{module} attention"] = attention
            modules[f"{module} mlp"] = [name for name in names if name not in attention]
        else:
            modules[module] = list(names)
    if settings.flat_order is not None:
        for names in modules.values():
            names.sort(key=settings.flat_order.index)
    return modules


# ---- a whole run -----------------------------------------------------------------------------------------------------


def run_method(
    shape: LlamaShape,
    initial: Parameters,
    batches: Sequence[Sequence[Batch]],
    learning_rates: Sequence[float],
    settings: MethodSettings,
    spoil: Spoil | None = None,
    *,
    flushed: bool = False,
) -> MethodResult:
    """Trains R replicas as `plain_edit.run_edit` does; batches [iteration][replica], iterations from 1.

    a-edit: replica i takes its n-th step with batches[n - 1][i] and the n-th learning rate.
    `flushed`: with `flush` at the end.
    """
    run = MethodRun(shape, initial, len(batches[0]), settings)
    if settings.warmup_steps == 0:
        run.set_anchor()
    for n, (batch_of, learning_rate) in enumerate(zip(batches, learning_rates, strict=True), 1):
        local_step = n - settings.warmup_steps
        if local_step > 0 and settings.method == "a-edit":
            break
        run.step_together(batch_of, learning_rate, synchronous=local_step <= 0)
        for i in range(len(run.replicas)):
            run.spoil(i, spoil)
        if local_step == 0:
            run.set_anchor()
        elif local_step > 0:
            run.sync_after_step(local_step)
    if settings.method == "a-edit":
        run_intervals(run, batches, learning_rates, spoil)
    if flushed:
        flush(run)
    return run.result()


def run_intervals(
    run: MethodRun, batches: Sequence[Sequence[Batch]], learning_rates: Sequence[float], spoil: Spoil | None
) -> None:
    """A-EDiT with a given number of steps of each replica in each interval."""
    settings = run.settings
    for k, counts in enumerate(settings.steps_of_intervals, 1):
        for i, count in enumerate(counts):
            for _ in range(count):
                n = run.made[i]
                run.step_alone(i, batches[n][i], learning_rates[n])
                run.spoil(i, spoil)
        if k == len(settings.steps_of_intervals) and settings.last_interval_is_open:
            continue
        made_since = [max(counts[i] for counts in run.steps_since.values()) for i in range(len(run.replicas))]
        if sum(made_since) >= settings.min_total_steps:
            run.sync(list(run.modules), run.new_record(list(run.modules)))


def flush(run: MethodRun) -> None:
    """The end of a training: what is in flight is applied, and one last sync of all modules is made and applied.

    co2: the pseudo gradient of the last, unfinished round is taken from the anchor that it began with, and only then
    are the two results applied, one after the other.
    """
    if run.anchor is None and run.has_anchor:
        return  # still in the warm-up
    is_co2 = run.settings.method in ("co2", "co2-sharded")
    due = list(run.modules) if any(any(counts) for counts in run.steps_since.values()) else []
    record = run.new_record(due)
    if is_co2 and due:
        run.sync(due, record)
    for module in list(run.in_flight):
        run.apply(module, run.in_flight.pop(module))
    if not is_co2 and due:
        for module in due:
            run.apply(module, run.launch(module, record, local_step=0), flush=True)
        run.finish(record)
