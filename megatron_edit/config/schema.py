"""Every setting of the program, once: a dataclass field is the flag, the YAML key, the help and the default.

A field `micro_batch_size` of any section is the flag `--micro-batch-size` and the key `micro_batch_size`; a
switch `bf16` also has `--no-bf16`, so that flags can undo what a file or a preset sets.
Names are Megatron-LM's where it has the setting; this project's own settings of the sync start with `edit_`.
Sections only group the help and the docs: flags and keys are unique over all of them.
`None` as a default means "not given"; what then holds is said in the help. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.tables.methods import DEFAULT_METHOD, METHODS


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    source: str | None = None,
) -> Any:
    """A dataclass field that carries all that the flag, the YAML key and the docs need.

    `minimum`: smallest value allowed, in the field's unit; `above`, `below`: bounds that are themselves not
    allowed. `source`: where a default comes from.
    """
    metadata = {
        "help": help, "choices": choices, "minimum": minimum, "above": above, "below": below,
        "metavar": metavar, "source": source,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The Llama that is trained."""

    model_size: str | None = setting(
        None, "preset of the model settings below; flags given beside it win",
        choices=("tiny", "350m", "1b", "3b", "7b", "llama2-7b", "llama3-8b"),
    )  # fmt: skip
    num_layers: int = setting(4, "transformer layers", minimum=1)
    hidden_size: int = setting(64, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = setting(
        None, "inner width of the SwiGLU MLP; default 8/3 hidden size, up to a multiple of 64", minimum=1
    )
    num_attention_heads: int = setting(8, "query heads", minimum=1)
    num_query_groups: int | None = setting(
        None, "key/value heads (grouped-query attention); default: as many as query heads", minimum=1
    )
    kv_channels: int | None = setting(None, "size of one head; default hidden size / query heads", minimum=1)
    seq_length: int = setting(128, "tokens of one training sample", minimum=1)
    max_position_embeddings: int | None = setting(
        None, "longest sequence that the model is meant for; default: the sequence length", minimum=1
    )
    rotary_base: float = setting(10000.0, "base of the rotary position embedding", minimum=1)
    rope_scaling_type: str = setting(
        "none", "how rotary frequencies are stretched", choices=("none", "linear", "llama3")
    )
    rope_scaling_factor: float = setting(8.0, "stretch of the rotary scaling", minimum=1)
    rope_scaling_low_freq_factor: float = setting(1.0, "llama3 scaling: low frequency factor", above=0)
    rope_scaling_high_freq_factor: float = setting(4.0, "llama3 scaling: high frequency factor", above=0)
    rope_scaling_original_max_position_embeddings: int = setting(
        8192, "llama3 scaling: sequence length before the stretch", minimum=1
    )
    norm_epsilon: float = setting(1e-5, "epsilon of RMSNorm", above=0)
    untie_embeddings_and_output_weights: bool = setting(
        False, "give the output head its own matrix instead of the embedding's"
    )
    add_qkv_bias: bool = setting(False, "bias on the query, key and value projections")
    add_attention_output_bias: bool = setting(False, "bias on the projection that follows the attention")
    qk_layernorm: bool = setting(False, "RMSNorm on each head's query and key before the rotary embedding, as in Qwen3")
    attention_dropout: float = setting(0.0, "dropout probability on attention weights", minimum=0, below=1)
    hidden_dropout: float = setting(0.0, "dropout probability on the residual branches", minimum=0, below=1)
    init_method_std: float = setting(0.02, "standard deviation of the initial weights", minimum=0)
    make_vocab_size_divisible_by: int = setting(
        128, "the vocabulary is padded to a multiple of this times the tensor parallel size", minimum=1
    )
    transformer_impl: str = setting(
        "local", "layers: megatron-core's own with torch SDPA attention, or Transformer Engine's (GPU)",
        choices=("local", "transformer_engine"),
    )  # fmt: skip


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks form the grid (sync, dp, pp, cp, tp); see docs/mesh.md."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer", minimum=1)
    pipeline_model_parallel_size: int = setting(1, "pipeline stages", minimum=1)
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "layers of one chunk of the interleaved pipeline schedule; default: 1F1B without interleaving",
        minimum=1,
    )  # fmt: skip
    sequence_parallel: bool = setting(
        False, "split the sequence over the tensor parallel ranks where layers are not split"
    )
    context_parallel_size: int = setting(
        1, "ranks that share one sequence (GPU with Transformer Engine only)", minimum=1
    )
    distributed_timeout_seconds: int = setting(
        600, "seconds after which a collective that a rank does not join ends the run", minimum=1
    )
    recompute_granularity: str | None = setting(
        None, "recompute activations in the backward pass: whole layers, or attention only",
        choices=("full", "selective"),
    )  # fmt: skip
    recompute_method: str | None = setting(
        None, "with full recompute: which layers form a unit", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = setting(None, "with full recompute: layers of a unit", minimum=1)


@dataclass(frozen=True)
class EditConfig:
    """The sync between replicas: EDiT (arXiv 2412.07210) and the methods that it is compared with (docs/methods.md)."""

    edit_method: str = setting(
        DEFAULT_METHOD, "synchronisation method; docs/methods.md gives the defaults of the settings below that say so",
        choices=tuple(METHODS),
    )  # fmt: skip
    edit_sync_interval: int = setting(
        128, "optimizer steps between two syncs (tau); 0 is an alias of --edit-method baseline", minimum=0,
        source="as in the paper's experiments",
    )  # fmt: skip
    edit_sync_time: float | None = setting(
        None, "a-edit: seconds after its last sync from which on a replica enters the next (T); default 600", above=0,
        source="arXiv 2412.07210",
    )  # fmt: skip
    edit_min_total_steps: int = setting(
        0, "a-edit: a sync before which all replicas together made fewer steps averages nothing; they go on as they "
        "are", minimum=0,
    )  # fmt: skip
    edit_step_weight_ratio: float = setting(
        0.5, "a-edit: part of a replica's weight that is its share of the steps; the rest is --edit-weighting",
        minimum=0, source="ours",
    )  # fmt: skip
    edit_num_replicas: int | None = setting(
        None, "replicas of the model; default: nodes / nodes that one replica needs", minimum=1
    )
    edit_warmup_steps: int = setting(
        0, "first optimizer steps that run as ordinary synchronous data parallelism", minimum=0
    )
    edit_modules: str = setting(
        "layer", "what is synchronised as one: a transformer layer, or its attention and its MLP apart (less to wait "
        "for at the start of the forward pass, more messages)", choices=("layer", "sublayer"),
    )  # fmt: skip
    edit_outer_lr: float | None = setting(
        None, "learning rate of the outer step (eta; slowmo: a); default: the method's", minimum=0,
        source="docs/methods.md",
    )  # fmt: skip
    edit_outer_momentum: float | None = setting(
        None, "momentum of the outer step (mu; slowmo and co2: beta); default: the method's", minimum=0, below=1,
        source="docs/methods.md",
    )  # fmt: skip
    edit_pseudo_grad_clip: float | None = setting(
        None, "largest norm of a module's averaged pseudo gradient (phi); 0 = off; default 10 for edit and a-edit, "
        "else 0", minimum=0, source="arXiv 2412.07210; the authors advise to try 1 and 10",
    )  # fmt: skip
    edit_anomaly_threshold: float | None = setting(
        None, "a replica whose norm lies this many standard deviations above its own past is left out of the "
        "module's average (delta); 0 = off, only non-finite norms are left out; default 3 for edit and a-edit, else 0",
        minimum=0, source="arXiv 2412.07210",
    )  # fmt: skip
    edit_anomaly_alpha: float = setting(
        0.02, "weight of a new observation in the detector's moving mean and variance (alpha)", above=0,
        below=1, source="arXiv 2412.07210",
    )  # fmt: skip
    edit_anomaly_warmup_syncs: int = setting(
        20, "syncs that a detector watches before it may flag", minimum=3, source="ours"
    )
    edit_weighting: str | None = setting(
        None, "weights of the replicas in the average: softmax of minus their norms, or equal; default softmax for "
        "edit and a-edit, else mean", choices=("softmax", "mean"),
    )  # fmt: skip
    edit_softmax_temperature: float = setting(1.0, "temperature of the softmax weights (T)", above=0)
    edit_consensus: str = setting(
        "none", "keep of each pseudo gradient only the elements whose sign the replicas agree on: the sign of the "
        "weighted sum, or that of most replicas", choices=("none", "sum", "count"), source="the authors' own reducers",
    )  # fmt: skip
    edit_sparsity: float = setting(
        0.0, "share of each pseudo gradient's elements that is dropped before the average; 0 = none", minimum=0, below=1
    )
    edit_sparsity_method: str = setting(
        "magnitude", "which elements stay: the largest, random ones, or random ones scaled up by 1 / (1 - sparsity)",
        choices=("magnitude", "random", "rescaled-random"), source="the authors' own reducers",
    )  # fmt: skip
    edit_inner_moments: str = setting(
        "keep", "what a sync does to Adam's moments: leaves them local, or averages them too",
        choices=("keep", "average"), source="arXiv 2412.07210 keeps them",
    )  # fmt: skip
    edit_inner_moments_interval: int = setting(
        1, "with --edit-inner-moments average: syncs from one to the next", minimum=1
    )
    edit_prefetch_depth: int = setting(
        1, "modules whose all-reduce is in flight ahead of the module that computes", minimum=1
    )
    edit_sync_placement: str | None = setting(
        None, "where the sync runs: layer by layer in the next forward pass, or blocking after the step; default: the "
        "method's", choices=("forward", "step"),
    )  # fmt: skip
    edit_num_fragments: int | None = setting(
        None, "streaming: parts of the model that synchronise at different steps of the interval; default: every "
        "module is one, as far as the interval has steps", minimum=1,
    )  # fmt: skip
    edit_sync_delay: int = setting(
        0, "streaming: steps during which a module's all-reduce runs before its result is applied (D)", minimum=0
    )
    edit_mixing_alpha: float | None = setting(
        None, "streaming with a delay: local := alpha local + (1 - alpha) synchronised; default: the local progress "
        "since the launch is kept on top", minimum=0, below=1,
        source="Streaming DiLoCo, arXiv 2501.18512; the default is ours",
    )  # fmt: skip
    edit_co2_gap_penalty: float = setting(1.0, "co2: divisor of the pseudo gradient (Lambda)", above=0, source="ours")
    edit_co2_momentum_clip: float = setting(
        0.0, "co2: largest absolute value of an element of the outer momentum (c); 0 = off", minimum=0
    )
    edit_cpu_offload: bool = setting(
        False, "keep anchor and outer momentum in host memory (pinned with CUDA); the result is the same bit for bit"
    )
    edit_comm_dtype: str = setting(
        "fp32", "what crosses between the replicas; below fp32 with per-block scales, error feedback and fp32 sums",
        choices=("fp32", "bf16", "int8", "int4"),
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, batch and precision."""

    micro_batch_size: int = setting(1, "samples of one forward pass of one data parallel rank", minimum=1)
    global_batch_size: int | None = setting(
        None, "samples of one iteration over all replicas; give this, or --replica-batch-size, or "
        "--step-batch-size-schedule", minimum=1,
    )  # fmt: skip
    replica_batch_size: int | None = setting(
        None, "samples of one iteration of one replica; the global batch grows and shrinks with the replicas",
        minimum=1,
    )  # fmt: skip
    step_batch_size_schedule: list[str] = setting(
        [], "the global batch from so many tokens on, in place of the two above: TOKENS:BATCH ..., also with K, M, B "
        "or T behind a number, like 0:768 250B:1536; as Megatron-LM's", metavar="TOKENS:BATCH",
    )  # fmt: skip
    rampup_batch_size: list[str] = setting(
        [], "start with a global batch of START and raise it by INCREMENT, each over an equal share of SAMPLES, up to "
        "--global-batch-size; as Megatron-LM's", metavar="START INCREMENT SAMPLES",
    )  # fmt: skip
    train_iters: int | None = setting(None, "optimizer steps of each replica; give this or --train-samples", minimum=0)
    train_samples: int | None = setting(None, "samples over all replicas", minimum=0)
    exit_interval: int | None = setting(None, "save and stop after an iteration that this divides", minimum=1)
    exit_duration_in_mins: float | None = setting(None, "save and stop after this many minutes", above=0)
    exit_signal_handler: bool = setting(True, "save and stop on SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank")
    z_loss_coeff: float = setting(
        0.0, "adds this times the mean over tokens of logsumexp(logits)^2 to the loss, which keeps logits small; the "
        "logged lm loss stays without it; 1e-4 in the source; 0 = off", minimum=0,
        source="PaLM, arXiv 2204.02311, section 5",
    )  # fmt: skip
    seed: int = setting(1234, "seed of weights, sample order and dropout", minimum=0, below=2**32)
    bf16: bool = setting(False, "train in bfloat16 with fp32 master weights and fp32 gradients")
    fp16: bool = setting(False, "train in float16 with dynamic loss scaling and fp32 master weights (GPU)")
    accumulate_allreduce_grads_in_fp32: bool = setting(True, "add up and reduce gradients in fp32")
    device: str = setting("auto", "where to train", choices=("auto", "cpu", "cuda"))
    deterministic_mode: bool = setting(False, "only kernels whose result does not vary from run to run")


@dataclass(frozen=True)
class OptimizerConfig:
    """Inner optimizer (AdamW) and its learning rate."""

    lr: float = setting(3e-4, "peak learning rate of the inner optimizer", minimum=0)
    min_lr: float = setting(0.0, "learning rate at the end of the decay", minimum=0)
    lr_decay_style: str = setting(
        "cosine", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_warmup_iters: int | None = setting(None, "iterations of linear warm-up", minimum=0)
    lr_warmup_samples: int | None = setting(None, "samples of linear warm-up", minimum=0)
    lr_warmup_fraction: float | None = setting(None, "warm-up as a share of the decay length", minimum=0, below=1)
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", minimum=0)
    lr_decay_iters: int | None = setting(
        None, "iterations until the minimum is reached, warm-up included; default: the run's", minimum=1
    )
    lr_decay_samples: int | None = setting(
        None, "samples until the minimum is reached, warm-up included; default: the run's", minimum=1
    )
    lr_wsd_decay_iters: int | None = setting(None, "WSD: iterations of the final decay", minimum=1)
    lr_wsd_decay_samples: int | None = setting(None, "WSD: samples of the final decay", minimum=1)
    lr_wsd_decay_style: str = setting(
        "linear", "WSD: shape of the final decay", choices=("linear", "cosine", "exponential", "minus_sqrt")
    )
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices; norms and biases get none", minimum=0)
    clip_grad: float = setting(1.0, "largest norm of a replica's gradient; 0 = off", minimum=0)
    adam_beta1: float = setting(0.9, "decay of the first moment", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "decay of the second moment", minimum=0, below=1)
    adam_eps: float = setting(1e-8, "epsilon of Adam", above=0)


@dataclass(frozen=True)
class DataConfig:
    """What is read, in which order."""

    data_path: list[str] = setting(
        [], "corpora: PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...", metavar="X"
    )
    train_data_path: list[str] = setting([], "corpora of the training split alone", metavar="X")
    valid_data_path: list[str] = setting(
        [], "corpora of the validation split alone; several sets, with a loss each: NAME=PREFIX NAME=PREFIX ..., a set "
        "may be a blend too: NAME=WEIGHT PREFIX WEIGHT PREFIX", metavar="X",
    )  # fmt: skip
    test_data_path: list[str] = setting([], "corpora of the test split alone", metavar="X")
    split: str = setting(
        "969,30,1", "shares of training, validation and test documents, in file order; with --data-path"
    )
    mock_data: bool = setting(False, "train on generated token sequences, without files")
    tokenizer_type: str | None = setting(
        None, "tokenizer; default ByteTokenizer with --mock-data",
        choices=("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
                 "HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"),
    )  # fmt: skip
    tokenizer_model: str | None = setting(None, "file or folder of the tokenizer", metavar="PATH")
    vocab_size: int | None = setting(
        None, "vocabulary of NullTokenizer; with others: rows of the model, if more than the tokenizer's ids",
        minimum=2,
    )  # fmt: skip
    eod_mask_loss: bool = setting(False, "no loss on the token that follows an end of document")
    reset_position_ids: bool = setting(False, "count positions from 0 again after an end of document")
    reset_attention_mask: bool = setting(False, "no attention to the documents before in a sample")
    num_workers: int = setting(1, "threads of each rank that read ahead; 0 = none", minimum=0)
    log_sample_ids: str | None = setting(
        None, "write the ids of the samples that each replica consumes to this file", metavar="FILE"
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation, on the anchor: the weights of the last completed sync."""

    eval_interval: int | None = setting(None, "iterations between evaluations; default: none", minimum=1)
    eval_iters: int = setting(
        10, "global batches of each evaluation, fewer when the split is shorter; 0 = no evaluation", minimum=0
    )
    eval_at_end: bool = setting(True, "evaluate the final weights")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting(None, "folder of the checkpoints", metavar="DIR")
    save_interval: int | None = setting(None, "iterations between saves; the end always saves", minimum=1)
    async_save: bool = setting(False, "copy the state and write the checkpoint while training goes on")
    keep_checkpoints: int = setting(
        0, "newest checkpoints to keep; older ones are deleted after a save; 0 = keep all", minimum=0
    )
    save_scope: str = setting(
        "full", "everything; or compact, at syncs only: anchor, outer state and the moments of replica 0, which all "
        "replicas then start from: not exact, but its size does not grow with the replicas",
        choices=("full", "compact"),
    )  # fmt: skip
    load: str | None = setting(
        None, "folder to resume from, or one checkpoint in it; missing is an error unless it equals --save",
        metavar="DIR",
    )  # fmt: skip
    ckpt_step: int | None = setting(None, "iteration to load instead of the last one", minimum=0)
    load_fallback: bool = setting(False, "when the checkpoint is damaged, load the complete one before it")
    finetune: bool = setting(
        False, "load the weights alone and start a new run from them: iteration, data and learning rate from 0"
    )
    load_optim: bool = setting(
        True, "load more than the weights; with --no-load-optim optimizer, sync and learning rate start anew, at the "
        "iteration and the place in the data of the checkpoint"
    )  # fmt: skip
    load_rng: bool = setting(True, "load the state of the random generators (dropout)")
    override_opt_param_scheduler: bool = setting(
        False, "take the learning rate schedule from the flags, as is the default"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "take the learning rate schedule from the checkpoint, not from the flags"
    )


@dataclass(frozen=True)
class LoggingConfig:
    """What is written where."""

    log_interval: int = setting(10, "iterations between log lines", minimum=1)
    log_throughput: bool = setting(False, "add tokens/s and TFLOP/s per device to the log line")
    metrics_file: str | None = setting(
        None, "metrics as JSON lines; default: metrics.jsonl in the --save folder", metavar="FILE"
    )
    tensorboard_dir: str | None = setting(None, "write TensorBoard files to this folder", metavar="DIR")
    wandb_project: str | None = setting(None, "write to this Weights & Biases project (extra `wandb`)")
    progress: str = setting(
        "auto", "progress display: on a terminal (auto), always plain lines, or rich always",
        choices=("auto", "plain", "rich"),
    )  # fmt: skip


@dataclass(frozen=True)
class CommandConfig:
    """What the command does with the settings. Flags only: these are not YAML keys."""

    config: str | None = setting(None, "YAML file of settings; flags beside it win", metavar="FILE.yaml")
    print_config: bool = setting(False, "print every setting with its source as YAML, and stop")
    dry_run: bool = setting(False, "make all checks, print the mesh and the batch arithmetic, and stop")
    help: bool = setting(False, "print this text, and stop")


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "edit": EditConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "command": CommandConfig,
}


@dataclass(frozen=True)
class Config:
    """All settings, frozen. `sources[name]`: "flag", "FILE.yaml", "preset NAME", "default" or "derived".

    `ignored_flags`: Megatron-LM's flags that were given and make no difference here. A Config that is made in
    Python may leave `sources` empty; a value that is not the default then counts as given.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    edit: EditConfig = field(default_factory=EditConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    command: CommandConfig = field(default_factory=CommandConfig)
    sources: dict[str, str] = field(default_factory=dict)
    ignored_flags: tuple[str, ...] = ()


class ConfigError(ValueError):
    """One or more settings that cannot work; `problems` holds one message each, in flag names and numbers.

    `advice`: lines to print after them.
    """

    def __init__(self, problems: Sequence[str], advice: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        self.advice = list(advice)
        super().__init__("\n".join(self.problems))
