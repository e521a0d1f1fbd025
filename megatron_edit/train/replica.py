"""This rank's part of one replica: model chunks in megatron-core's DDP, distributed optimizer, sync engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.model.init import initialize_weights
from megatron_edit.model.llama import build_model_chunks, transformer_config, virtual_stages_of
from megatron_edit.model.loss import forward_step
from megatron_edit.parallel.layout import Layout
from megatron_edit.parallel.mesh import Mesh, build_mesh
from megatron_edit.platform import Platform
from megatron_edit.sync.engine import Observer, SyncEngine
from megatron_edit.sync.modules import GradientReducer, ReplicaDataParallel
from megatron_edit.tables.parameters import module_keys


@dataclass
class Replica:
    """What one rank trains with."""

    config: ResolvedConfig
    mesh: Mesh
    transformer_config: TransformerConfig
    chunks: list[ReplicaDataParallel]
    optimizer: MegatronOptimizer
    reducer: GradientReducer
    engine: SyncEngine
    _schedule: Callable[..., list[dict[str, torch.Tensor]]]
    _p2p: P2PCommunicator | None

    def forward_backward(
        self, microbatches: list[dict[str, torch.Tensor]], *, forward_only: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """megatron-core's schedule over this rank's microbatches: a loss dict each on the last stage, else []."""
        device = self.mesh.platform.device
        on_device = [{k: t.to(device, non_blocking=True) for k, t in batch.items()} for batch in microbatches]
        iterators = [iter(on_device) for _ in self.chunks]
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.training.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.mesh.process_groups,
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Learning rate and weight decay of the next inner step, for every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self.config.optimizer.weight_decay * group.get("wd_mult", 1.0)


def mesh_of(config: ResolvedConfig, platform: Platform) -> Mesh:
    """The mesh that `config` asks for, over all ranks of the default group; collective."""
    parallel = config.parallel
    layout = Layout.from_world(
        dist.get_world_size(),
        num_replicas=config.edit.edit_num_replicas,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
    )
    return build_mesh(
        layout,
        platform,
        timeout_seconds=parallel.distributed_timeout_seconds,
        virtual_pipeline_model_parallel_size=virtual_stages_of(config.model, parallel),
    )


def build_replica(
    config: ResolvedConfig, mesh: Mesh, vocab_size: int, observer: Observer | None = None
) -> Replica:
    """Model, optimizer and engine of this rank; collective over the world."""
    megatron_config = transformer_config(
        config.model,
        config.parallel,
        params_dtype=_parameter_dtype(config),
        device_type=mesh.platform.device.type,
        deterministic_mode=config.training.deterministic_mode,
    )
    models = build_model_chunks(
        config.model, megatron_config, vocab_size, mesh.process_groups, config.training.z_loss_coeff
    )
    initialize_weights(models, config.model, vocab_size, config.training.seed, mesh.process_groups.tp)
    reducer = GradientReducer(mesh)
    chunks = [
        ReplicaDataParallel(
            reducer=reducer,
            modules=config.edit.edit_modules,
            config=megatron_config,
            ddp_config=_ddp_config(config),
            module=model,
            pg_collection=mesh.process_groups,
        )
        for model in models
    ]
    optimizer = build_optimizer(config, chunks, mesh.process_groups)
    engine = SyncEngine(
        config.edit,
        mesh,
        chunks,
        optimizer,
        reducer,
        module_keys=module_keys(config.model.num_layers, config.edit.edit_modules),
        seed=config.training.seed,
        observer=observer,
    )
    mesh.seed_dropout(config.training.seed)
    pipelined = mesh.layout.pp > 1
    return Replica(
        config=config,
        mesh=mesh,
        transformer_config=megatron_config,
        chunks=chunks,
        optimizer=optimizer,
        reducer=reducer,
        engine=engine,
        _schedule=get_forward_backward_func(
            pp_size=mesh.layout.pp, vp_size=megatron_config.virtual_pipeline_model_parallel_size
        ),
        _p2p=P2PCommunicator(mesh.process_groups.pp, megatron_config) if pipelined else None,
    )


def _ddp_config(config: ResolvedConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.training.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=1,  # the narrowed groups already end at the replica's edge
    )


def build_optimizer(
    config: ResolvedConfig, chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """megatron-core's distributed optimizer with fused AdamW; vectors (norms, biases) get no weight decay."""
    optimizer, training = config.optimizer, config.training
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=training.bf16,
        fp16=training.fp16,
        params_dtype=_parameter_dtype(config),
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    vectors = ParamKey(predicate=ParamPredicate(name="vectors", fn=lambda parameter: parameter.dim() == 1))
    built = get_megatron_optimizer(
        settings,
        chunks,
        config_overrides={vectors: ParamGroupOverride(wd_mult=0.0)},
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    _use_fused_adam(built)
    return built


def _use_fused_adam(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW in one kernel; megatron-core builds it with torch's default, a loop over parameters on a CPU."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _parameter_dtype(config: ResolvedConfig) -> Any:
    if config.training.bf16:
        return torch.bfloat16
    return torch.float16 if config.training.fp16 else torch.float32
