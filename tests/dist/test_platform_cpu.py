"""megatron-core trains on the CPU platform: tensor parallelism, distributed optimizer, recompute, dropout."""

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.platform import get_platform
from megatron_edit.testing.ranks import run_ranks

SEQUENCE_LENGTH, BATCH_SIZE, VOCABULARY_SIZE = 16, 4, 64


def train(rank, world_size, *, tensor_model_parallel_size, steps=4, dropout=0.0, recompute=False, bf16=False):
    """Trains a two-layer GPTModel of megatron-core; returns each step's loss and the last norm's weight."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_model_parallel_size)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=tensor_model_parallel_size,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda(torch.cuda.current_device())
    if bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=5000,
        grad_reduce_in_fp32=True,
    )  # fmt: skip
    model = DistributedDataParallel(config, ddp_config, model)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.0,
            bf16=bf16,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            params_dtype=config.params_dtype,
            overlap_param_gather=True,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_sync_func, config.no_sync_func = model.start_grad_sync, model.no_sync
    config.param_sync_func = model.start_param_sync

    def forward_step(iterator, model):
        tokens = next(iterator)  # [b, s + 1]
        positions = torch.arange(SEQUENCE_LENGTH, device="cuda").expand(len(tokens), -1)
        mask = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool, device="cuda").triu(1)
        losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])  # [b, s]
        return losses, lambda output: (output.float().mean(), {"loss": output.float().mean().detach()})

    data_parallel_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(data_parallel_rank)
    tokens = torch.randint(0, VOCABULARY_SIZE, (BATCH_SIZE, SEQUENCE_LENGTH + 1), generator=generator)
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (reduced,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([tokens]),
            model=[model],
            num_microbatches=1,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=BATCH_SIZE,
            forward_only=False,
        )
        succeeded, gradient_norm, _ = optimizer.step()
        assert succeeded and gradient_norm > 0
        losses.append(reduced["loss"].item())
    model.disable_forward_pre_hook(param_sync=True)
    norm_weight = dict(model.named_parameters())
    (name,) = [name for name in norm_weight if name.endswith("final_layernorm.weight")]
    return losses, norm_weight[name].detach().float().clone()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("world_size", "tensor_model_parallel_size"), [(1, 1), (2, 2), (2, 1)], ids=["1 rank", "TP2", "DP2"]
)
def test_megatron_trains(world_size, tensor_model_parallel_size, bf16):
    body = functools.partial(train, tensor_model_parallel_size=tensor_model_parallel_size, bf16=bf16)
    results = run_ranks(body, world_size)
    losses, norm_weight = results[0]
    assert losses[0] == pytest.approx(4.16, abs=0.3)  # ln 64
    assert losses[-1] < losses[0] - 0.3
    assert not torch.equal(norm_weight, torch.ones_like(norm_weight))
    for other_losses, other_norm_weight in results[1:]:
        assert torch.equal(other_norm_weight, norm_weight)
        if tensor_model_parallel_size == 2:
            assert other_losses == losses


def test_recompute_draws_the_same_dropout():
    """Recomputing a layer restores the generators of the model-parallel random state, as on CUDA."""
    body = functools.partial(train, tensor_model_parallel_size=2, dropout=0.2)
    plain = run_ranks(body, 2)
    recomputed = run_ranks(functools.partial(body, recompute=True), 2)
    without_dropout = run_ranks(functools.partial(body, dropout=0.0), 2)
    assert plain[0][0] == recomputed[0][0] and torch.equal(plain[0][1], recomputed[0][1])
    assert plain[0][0] != without_dropout[0][0]


def completion_order(rank, world_size, backend):
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=20))
    large, small = torch.ones(2**23), torch.ones(4)  # 32 MiB and 16 bytes
    first = dist.all_reduce(large, group=group, async_op=True)
    dist.all_reduce(small, group=group, async_op=True).wait()
    finished = first.is_completed()
    first.wait()
    assert large[-1] == small[0] == world_size
    return finished


def test_sync_backend_finishes_in_the_order_of_issue():
    assert run_ranks(completion_order, 2, get_platform("cpu").sync_backend()) == [True, True]


def test_sync_backend_keeps_the_time_out():
    def times_out(rank, world_size):
        group = dist.new_group(backend=get_platform("cpu").sync_backend(), timeout=timedelta(seconds=1))
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.ones(1), group=group)
        return time.monotonic() - start

    assert 1 <= run_ranks(times_out, 2)[0] < 5


def test_collectives_that_megatron_uses():
    """In place on slices of one buffer, asynchronous and coalesced, as megatron-core's buckets issue them."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    def collectives(rank, world_size):
        buffers = [torch.arange(8.0) * k + rank for k in (1, 2)]
        shards = [buffer.view(world_size, -1)[rank] for buffer in buffers]
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as handles:
            for buffer, shard in zip(buffers, shards, strict=True):
                dist.reduce_scatter_tensor(shard, buffer, op=dist.ReduceOp.AVG, async_op=True)
        handles.wait()
        averages = [shard.clone() for shard in shards]
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as handles:
            for buffer, shard in zip(buffers, shards, strict=True):
                dist.all_gather_into_tensor(buffer, shard, async_op=True)
        handles.wait()
        return averages, buffers

    for rank, (averages, buffers) in enumerate(run_ranks(collectives, 2)):
        for k, average, buffer in zip((1, 2), averages, buffers, strict=True):
            expected = torch.arange(8.0) * k + 0.5
            assert torch.equal(average, expected.view(2, -1)[rank])
            assert torch.equal(buffer, expected)
