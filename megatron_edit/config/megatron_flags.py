"""Megatron-LM's flags that this program has no setting for: accepted, translated, or refused.

A script written for Megatron-LM should run here with the same meaning or not at all. Flags whose effect
this program always has (or that only steer kernels and overlap) are accepted and listed in one warning
line; a few are spelled differently here and translated; those that would change the result, and are not
built, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_edit.config.data_args import read_data_args, read_per_split_data_args


@dataclass(frozen=True)
class MegatronFlag:
    """`takes_value`: the flag has an argument. `allowed`: None = accepted whatever the value; otherwise only
    these values are, so an empty tuple refuses the flag. `reason` is shown when it is refused.
    """

    takes_value: bool = False
    allowed: tuple[str, ...] | None = None
    reason: str = ""

    def accepts(self, values: list[str]) -> bool:
        """Whether the flag with these arguments changes nothing here."""
        if self.allowed is None:
            return True
        return len(values) == 1 and any(_same(values[0], allowed) for allowed in self.allowed)


def _same(given: str, allowed: str) -> bool:
    try:
        return float(given) == float(allowed)
    except ValueError:
        return given.lower() == allowed.lower()


def _only(*allowed: str, reason: str) -> MegatronFlag:
    return MegatronFlag(takes_value=True, allowed=allowed, reason=reason)


def _refused(reason: str) -> MegatronFlag:
    return MegatronFlag(allowed=(), reason=reason)


_SWITCHES_WITHOUT_EFFECT = (
    # always so here
    "--use-mcore-models", "--swiglu", "--group-query-attention", "--disable-bias-linear",
    "--no-position-embedding", "--use-rotary-position-embeddings", "--use-distributed-optimizer",
    "--overlap-grad-reduce", "--overlap-param-gather", "--no-bias-gelu-fusion",
    "--exit-on-missing-checkpoint", "--use-dist-ckpt", "--ckpt-fully-parallel-save",
    "--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load", "--dataloader-fast-cache-load",
    "--use-cpu-initialization", "--no-create-attention-mask-in-dataloader", "--no-mmap-bin-files",
    # which kernel computes it
    "--use-flash-attn", "--attention-softmax-in-fp32", "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion", "--no-gradient-reduce-div-fusion", "--cross-entropy-loss-fusion",
    "--apply-rope-fusion", "--no-async-tensor-model-parallel-allreduce", "--tp-comm-overlap",
    "--no-overlap-p2p-communication", "--defer-embedding-wgrad-compute", "--no-align-param-gather",
    "--overlap-p2p-communication-warmup-flush", "--use-ring-exchange-p2p",
    "--no-use-tokenizer-model-from-checkpoint-args", "--delay-wgrad-compute", "--ddp-average-in-collective",
    "--ddp-pad-buckets-for-high-nccl-busbw", "--manual-gc", "--no-manual-gc-eval",
    "--overlap-param-gather-with-optimizer-step",
    # what is printed or measured
    "--log-params-norm", "--log-num-zeros-in-grad", "--log-progress", "--log-validation-ppl-to-tensorboard",
    "--log-timers-to-tensorboard", "--log-memory-to-tensorboard", "--log-world-size-to-tensorboard",
    "--no-one-logger", "--profile", "--use-pytorch-profiler", "--record-memory-history", "--log-straggler",
    "--no-check-for-nan-in-loss-and-grad", "--no-barrier-with-level-1-timing",
)  # fmt: skip

_VALUES_WITHOUT_EFFECT = (
    "--local-rank", "--local_rank", "--distributed-backend", "--timing-log-level", "--timing-log-option",
    "--data-cache-path", "--tensorboard-log-interval", "--tensorboard-queue-size", "--wandb-save-dir",
    "--wandb-exp-name", "--wandb-entity", "--manual-gc-interval", "--empty-unused-memory-level",
    "--num-dataset-builder-threads", "--nccl-communicator-config-path", "--profile-step-start",
    "--profile-step-end", "--profile-ranks", "--attention-backend", "--ddp-bucket-size",
    "--ddp-num-buckets", "--log-memory-interval",
)  # fmt: skip

_FSDP = "FSDP is not built here: the distributed optimizer shards inside a replica"
_DENSE_ONLY = "mixture of experts is not built here: the model is a dense Llama"
_LLAMA_ONLY = "the model is a Llama"
_UNEVEN_STAGES = "unequal pipeline stages are not built here: every stage holds the same number of layers"
_LOW_PRECISION = "FP8 and FP4 are not built here: use --bf16"
_CHECKPOINT_PARTS = "a full checkpoint holds everything that a resume needs; see --save-scope compact"
_SYNC_AXIS = "the distributed optimizer shards inside a replica; set the replicas with --edit-num-replicas"

MEGATRON_FLAGS: dict[str, MegatronFlag] = {
    **dict.fromkeys(_SWITCHES_WITHOUT_EFFECT, MegatronFlag()),
    **dict.fromkeys(_VALUES_WITHOUT_EFFECT, MegatronFlag(takes_value=True)),
    # accepted with the one value that this program computes
    "--normalization": _only("RMSNorm", reason="the norms are RMSNorm"),
    "--position-embedding-type": _only("rope", reason="positions are rotary embeddings"),
    "--rotary-percent": _only("1.0", reason="the rotary embedding covers the whole head"),
    "--optimizer": _only("adam", reason="the inner optimizer is AdamW"),
    "--ckpt-format": _only("torch_dist", reason="checkpoints have a format of their own (docs/checkpoints.md)"),
    "--dist-ckpt-format": _only("torch_dist", reason="checkpoints have a format of their own (docs/checkpoints.md)"),
    "--expert-model-parallel-size": _only("1", reason=_DENSE_ONLY),
    "--expert-tensor-parallel-size": _only("1", reason=_DENSE_ONLY),
    "--dataloader-type": _only("single", reason="the order of samples is one of its own (docs/batch-and-data.md)"),
    "--weight-decay-incr-style": _only("constant", reason="the weight decay is constant"),
    "--num-distributed-optimizer-instances": _only("1", reason=_SYNC_AXIS),
    "--data-parallel-sharding-strategy": _only("no_shard", reason=_FSDP),
    "--main-grads-dtype": _only("fp32", reason="gradients are added up in fp32"),
    "--main-params-dtype": _only("fp32", reason="master weights are fp32: the sync subtracts them"),
    "--exp-avg-dtype": _only("fp32", reason="Adam's moments are fp32"),
    "--exp-avg-sq-dtype": _only("fp32", reason="Adam's moments are fp32"),
    # would change the result
    "--decrease-batch-size-if-needed": _refused("a batch that does not divide is refused, and what works is said"),
    "--num-experts": _refused(_DENSE_ONLY),
    "--decoder-first-pipeline-num-layers": _refused(_UNEVEN_STAGES),
    "--decoder-last-pipeline-num-layers": _refused(_UNEVEN_STAGES),
    "--pipeline-model-parallel-layout": _refused(_UNEVEN_STAGES),
    "--account-for-embedding-in-pipeline-split": _refused(_UNEVEN_STAGES),
    "--account-for-loss-in-pipeline-split": _refused(_UNEVEN_STAGES),
    "--use-megatron-fsdp": _refused(_FSDP),
    "--use-custom-fsdp": _refused(_FSDP),
    "--use-torch-fsdp2": _refused(_FSDP),
    "--multi-latent-attention": _refused(_LLAMA_ONLY),
    "--heterogeneous-layers-config-path": _refused(_LLAMA_ONLY),
    "--hybrid-override-pattern": _refused(_LLAMA_ONLY),
    "--is-hybrid-model": _refused(_LLAMA_ONLY),
    "--spec": _refused(_LLAMA_ONLY),
    "--squared-relu": _refused("the MLP is SwiGLU"),
    "--openai-gelu": _refused("the MLP is SwiGLU"),
    "--quick-geglu": _refused("the MLP is SwiGLU"),
    "--onnx-safe": _refused("the MLP is SwiGLU"),
    "--add-bias-linear": _refused("linear layers have no bias; --add-qkv-bias gives query, key and value one"),
    "--apply-layernorm-1p": _refused("the norms are RMSNorm"),
    "--apply-residual-connection-post-layernorm": _refused(_LLAMA_ONLY),
    "--window-size": _refused("sliding-window attention is not built here"),
    "--add-position-embedding": _refused("positions are rotary embeddings"),
    "--rotary-interleaved": _refused("the rotary embedding turns halves, as in Llama"),
    "--mtp-num-layers": _refused("multi-token prediction is not built here"),
    "--fp8-format": _refused(_LOW_PRECISION),
    "--fp8-param-gather": _refused(_LOW_PRECISION),
    "--fp4-format": _refused(_LOW_PRECISION),
    "--use-precision-aware-optimizer": _refused("master weights and moments are fp32"),
    "--grad-reduce-in-bf16": _refused("see --no-accumulate-allreduce-grads-in-fp32"),
    "--fp32-residual-connection": _refused("the residual stream has the precision of the model"),
    "--fp16-lm-cross-entropy": _refused("the loss is taken in fp32"),
    "--loss-scale": _refused("--fp16 uses dynamic loss scaling"),
    "--optimizer-cpu-offload": _refused("offloading the optimizer is not built here"),
    "--sgd-momentum": _refused("the inner optimizer is AdamW"),
    "--decoupled-lr": _refused("all parameters have one learning rate"),
    "--decoupled-min-lr": _refused("all parameters have one learning rate"),
    "--start-weight-decay": _refused("the weight decay is constant: use --weight-decay"),
    "--end-weight-decay": _refused("the weight decay is constant: use --weight-decay"),
    "--fim-data": _refused("fill-in-the-middle data is not built here"),
    "--sft": _refused("fine-tuning on dialogues is not built here"),
    "--use-checkpoint-args": _refused("the model is described by the flags given now"),
    "--no-save-optim": _refused(_CHECKPOINT_PARTS),
    "--no-save-rng": _refused(_CHECKPOINT_PARTS),
    "--pretrained-checkpoint": _refused("convert it (tools/convert_checkpoint.py) and give --load DIR --finetune"),
    "--skip-train": _refused("tools/evaluate.py evaluates a checkpoint"),
    "--iterations-to-skip": _refused("skipping iterations would change the order of samples"),
    "--recompute-modules": _refused("--recompute-granularity selective recomputes the attention"),
    "--distribute-saved-activations": _refused("distributed recompute is not built here"),
    "--hierarchical-context-parallel-sizes": _refused("context parallelism has one level here"),
    "--cp-comm-type": _only("p2p", reason="context parallelism uses point-to-point communication"),
    "--data-parallel-random-init": _refused("replicas must start from equal weights"),
    "--standalone-embedding-stage": _refused(_UNEVEN_STAGES),
    "--use-tp-pp-dp-mapping": _refused("a replica is a contiguous block of ranks; see docs/mesh.md"),
    "--num-virtual-stages-per-pipeline-rank": _refused("give --num-layers-per-virtual-pipeline-stage"),
    "--encoder-num-layers": _refused("give --num-layers"),
    "--decoder-num-layers": _refused("give --num-layers"),
    "--encoder-seq-length": _refused("give --seq-length"),
    "--decoder-seq-length": _refused("give --seq-length"),
    "--vocab-file": _refused("give --tokenizer-model"),
    "--merge-file": _refused("give --tokenizer-model"),
    "--yaml-cfg": _refused("give --config FILE.yaml"),
    "--batch-size": _refused("give --micro-batch-size"),
    "--warmup": _refused("give --lr-warmup-iters"),
    "--model-parallel-size": _refused("give --tensor-model-parallel-size"),
    "--checkpoint-activations": _refused("give --recompute-granularity full"),
    "--init-method-xavier-uniform": _refused("weights are drawn from a normal distribution"),
    "--embedding-init-method-std": _refused("all matrices share --init-method-std"),
}

# every other flag of mixture of experts begins so
MOE_PREFIX = "--moe-"

# Megatron's spelling -> how many arguments, and what they set here
TRANSLATED: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {  # raise ValueError
    "--use-rope-scaling": (0, lambda _: {"rope_scaling_type": "llama3"}),
    "--recompute-activations": (0, lambda _: {"recompute_granularity": "selective"}),
    "--override-opt_param-scheduler": (0, lambda _: {"override_opt_param_scheduler": True}),
    "--use-checkpoint-opt_param-scheduler": (0, lambda _: {"use_checkpoint_opt_param_scheduler": True}),
    "--data-args-path": (1, read_data_args),
    "--per-split-data-args-path": (1, read_per_split_data_args),
    "--distributed-timeout-minutes": (1, lambda v: {"distributed_timeout_seconds": int(v) * 60}),
    "--rotary-seq-len-interpolation-factor": (
        1,
        lambda v: {"rope_scaling_type": "linear", "rope_scaling_factor": float(v)},
    ),
}
