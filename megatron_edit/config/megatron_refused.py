"""Megatron-LM's flags that would change the result and are not built, by reason; read by `megatron_flags.py`.

Longer than other files: it is one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Flags that would change the result and are not built.

    why       shown when one of them is refused
    instead   what the run does when they are left out
    flags     refused wherever they are given
    parts     refused only beside one of `flags` or `of`: without it they have no effect, in Megatron-LM neither
    of        further flags or settings that switch on what `parts` belong to
    """

    why: str
    instead: str
    flags: str = ""
    parts: str = ""
    of: str = ""


_LLAMA = "the model is a Llama"
_STAGES = "every pipeline stage holds the same number of layers"
REFUSALS: tuple[Refusal, ...] = (
    # ---- the model
    Refusal(
        "mixture of experts is not built here: the model is a dense Llama",
        "the model is a dense Llama",
        flags="--num-experts",
        parts="""
        --overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release
        --overlap-dispatch-backward-with-experts-wgrad
        """,
    ),
    Refusal(
        "the model is a Llama, without latent attention",
        _LLAMA,
        flags="--multi-latent-attention",
        parts="""
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor --mscale
        --mscale-all-dim --mla-down-proj-fusion
        """,
    ),
    Refusal(
        "the model is a Llama: its layers are of one kind",
        _LLAMA,
        flags="""
        --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json --hybrid-override-pattern
        --hybrid-layer-pattern --is-hybrid-model --spec --experimental-attention-variant --linear-attention-freq
        --attention-output-gate --apply-residual-connection-post-layernorm --retro-add-retriever
        --enable-mhc-connections
        """,
        parts="""
        --hybrid-attention-ratio --hybrid-mlp-ratio --disable-mamba-mem-eff-path --mamba-head-dim
        --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype --mamba-num-groups --mamba-num-heads
        --mamba-state-dim --mamba-training-ssm-states-dtype --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute
        --gdp-num-householder --linear-conv-kernel-dim --linear-key-head-dim --linear-num-key-heads
        --linear-num-value-heads --linear-value-head-dim --dsa-indexer-head-dim --dsa-indexer-k-norm-epsilon
        --dsa-indexer-k-norm-fp32 --dsa-indexer-loss-coeff --dsa-indexer-n-heads --dsa-indexer-rope-interleaved
        --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu
        --disable-dsa-indexer-scoring-relu --dsa-indexer-skip-topk-offset --dsa-indexer-topk --dsa-indexer-topk-freq
        --dsa-indexer-use-sparse-loss --dsa-kernel-backend --mhc-init-gating-factor --mhc-num-residual-streams
        --mhc-recompute-layer-num --mhc-sinkhorn-iterations --retro-attention-gate --retro-cyclic-train-iters
        --retro-encoder-attention-dropout --retro-encoder-hidden-dropout --retro-encoder-layers
        --retro-no-verify-neighbor-count --retro-num-neighbors --retro-num-retrieved-chunks --retro-project-dir
        --retro-return-doc-ids --retro-workdir
        """,
    ),
    Refusal(
        "an encoder and a decoder are not built here",
        _LLAMA,
        flags="""
        --decoder-num-layers --decoder-seq-length --pipeline-model-parallel-split-rank
        """,
    ),
    Refusal(
        "the MLP is SwiGLU",
        "the MLP is SwiGLU",
        flags="""
        --squared-relu --openai-gelu --quick-geglu --onnx-safe --activation-func-clamp-value --xielu
        """,
    ),
    Refusal(
        "linear layers have no bias; --add-qkv-bias gives query, key and value one",
        "linear layers have no bias",
        flags="--add-bias-linear",
    ),
    Refusal(
        "the weights of the norms are kept as they are, around 1, and not as their distance from it",
        "the weights of the norms are kept around 1",
        flags="--apply-layernorm-1p",
    ),
    Refusal(
        "queries and keys are not normalised so; --qk-layernorm is RMSNorm on each head, as in Qwen3",
        "queries and keys are not normalised, or by --qk-layernorm",
        flags="--qk-l2-norm --qk-clip",
        parts="--qk-clip-alpha --qk-clip-threshold",
    ),
    Refusal(
        "sliding-window attention is not built here",
        "the attention sees the whole sequence",
        flags="--window-size",
        parts="--window-attn-skip-freq",
    ),
    Refusal(
        "positions are rotary embeddings, in every layer",
        "positions are rotary embeddings, in every layer",
        flags="--add-position-embedding --no-rope-freq --mrope-section",
    ),
    Refusal(
        "YaRN is not built here: --use-rope-scaling is Llama 3's, --rotary-seq-len-interpolation-factor is linear",
        "rotary frequencies are not stretched",
        flags="""
        --yarn-beta-fast --yarn-beta-slow --yarn-original-max-position-embeddings
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
        """,
    ),
    Refusal(
        "the rotary embedding turns halves, as in Llama",
        "the rotary embedding turns halves",
        flags="--rotary-interleaved",
    ),
    Refusal(
        "multi-token prediction is not built here",
        "only the next token is predicted",
        flags="--mtp-standalone --mtp-hybrid-override-pattern",
        parts="--mtp-detach-heads --mtp-hsm --mtp-loss-scaling-factor --mtp-use-repeated-layer",
        of="--mtp-num-layers",
    ),
    Refusal(
        "weights are drawn from a normal distribution, all matrices with --init-method-std",
        "weights are drawn with --init-method-std",
        flags="--init-method-xavier-uniform --embedding-init-method-std",
    ),
    Refusal(
        "maximal update parametrization is not built here",
        "no width is scaled against a base model",
        flags="--use-mup",
        parts="""
        --mup-attn-scale-power --mup-base-head-dim --mup-base-hidden-size --mup-embedding-mult --mup-output-mult
        --mup-width-mult
        """,
    ),
    Refusal("the model is megatron-core's", "the model is megatron-core's", flags="--use-legacy-models"),
    Refusal(
        "the vocabulary is padded to --make-vocab-size-divisible-by times the tensor parallel size",
        "the vocabulary is padded by --make-vocab-size-divisible-by",
        flags="--padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size",
    ),
    # ---- precision
    Refusal(
        "FP8 and FP4 are not built here: use --bf16",
        "matrices are multiplied in the precision of --bf16",
        flags="--fp8-format --fp4-format --te-precision-config-file --kitchen-config-file --kitchen-recipe-number",
        parts="""
        --fp8-amax-compute-algo --fp8-amax-history-len --fp8-interval --fp8-margin --fp8-output-proj
        --fp8-param-gather --fp8-quantizer-factory --fp8-recipe --no-fp8-wgrad --disable-fp8-wgrad --fp4-param-gather
        --fp4-quantizer-factory --fp4-recipe --first-last-layers-bf16 --num-layers-at-start-in-bf16
        --num-layers-at-end-in-bf16 --keep-fp8-transpose-cache --keep-fp8-transpose-cache-when-using-custom-fsdp
        --reuse-grad-buf-for-mxfp8-param-ag --kitchen-attention-backend --use-kitchen-attention
        """,
    ),
    Refusal(
        "gradients are reduced in fp32; see --no-accumulate-allreduce-grads-in-fp32",
        "gradients are added up in fp32",
        flags="--grad-reduce-in-bf16",
    ),
    Refusal(
        "the residual stream has the precision of the model",
        "the residual stream has the precision of the model",
        flags="--fp32-residual-connection",
    ),
    Refusal(
        "the loss is taken in fp32", "the loss is taken in fp32", flags="--fp16-lm-cross-entropy --output-logit-dtype"
    ),
    Refusal(
        "--fp16 uses dynamic loss scaling",
        "without --fp16 no loss is scaled, with it dynamically",
        flags="--loss-scale",
    ),
    Refusal(
        "no kernel is chosen for this; see --deterministic-mode",
        "PyTorch's defaults choose the kernels",
        flags="--batch-invariant-mode --disable-bf16-reduced-precision-matmul",
        parts="--batch-invariant-backend",
    ),
    # ---- the optimizer
    Refusal(
        "the inner optimizer is AdamW",
        "the inner optimizer is AdamW",
        of="--optimizer",
        parts="""
        --sgd-momentum --lion-beta1 --lion-beta2 --muon-coefficient-type --muon-extra-scale-factor
        --muon-fp32-matmul-prec --muon-momentum --muon-nesterov --muon-no-split-qkv --muon-num-ns-steps
        --muon-scalar-optimizer --muon-scale-mode --muon-tp-mode --muon-use-nesterov --muon-use-syrk --ademamix-alpha
        --ademamix-beta3
        --ademamix-beta3-warmup --ademamix-alpha-warmup
        """,
    ),
    Refusal(
        "all parameters have one learning rate",
        "all parameters have one learning rate",
        flags="--decoupled-lr --decoupled-min-lr",
    ),
    Refusal(
        "the weight decay is constant: use --weight-decay",
        "the weight decay is --weight-decay throughout",
        flags="--start-weight-decay --end-weight-decay",
    ),
    Refusal(
        "norms and biases get no weight decay",
        "norms and biases get no weight decay",
        flags="--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
    ),
    Refusal("all layers are trained", "all layers are trained", flags="--freeze-all-layers"),
    Refusal(
        "offloading is not built here (--edit-cpu-offload is for the sync's own state)",
        "activations and optimizer state stay on the device",
        flags="--optimizer-cpu-offload --fine-grained-activation-offloading",
        parts="""
        --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload
        --no-pin-cpu-grads --no-pin-cpu-params --activation-offload-fraction --delay-offload-until-cuda-graph
        --delta-offload-bytes-across-pp-ranks --fine-grained-offloading-max-inflight-offloads
        --min-offloaded-tensor-size --offload-modules --cpu-offloading-retain-pinned-cpu-buffers
        """,
        of="--cpu-offloading-num-layers",
    ),
    # ---- ranks
    Refusal(
        "FSDP is not built here: the distributed optimizer shards inside a replica",
        "the distributed optimizer shards inside a replica",
        flags="--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2",
        parts="""
        --enable-full-sharding-in-hsdp --fsdp-db-use-persist-buf-on-alloc-fail --fsdp-double-buffer
        --fsdp-manual-registration --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-grad-comm-dtype
        --megatron-fsdp-main-grads-dtype --megatron-fsdp-main-params-dtype --megatron-fsdp-max-pool-double-buffer
        --megatron-fsdp-version --outer-dp-sharding-strategy --suggested-communication-unit-size
        --torch-fsdp2-no-reshard-after-forward --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        """,
    ),
    Refusal(
        "unequal pipeline stages are not built here: every stage holds the same number of layers",
        _STAGES,
        flags="""
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --standalone-embedding-stage
        """,
    ),
    Refusal(
        "give --num-layers-per-virtual-pipeline-stage",
        "the pipeline is not interleaved",
        flags="--num-virtual-stages-per-pipeline-rank",
    ),
    Refusal(
        "a replica is a contiguous block of ranks; see docs/mesh.md",
        "ranks are ordered as in docs/mesh.md",
        flags="--use-tp-pp-dp-mapping",
    ),
    Refusal(
        "weights are not sharded further (GTP) here",
        "each tensor parallel rank holds its weights whole",
        flags="--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards",
        parts="""
        --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub --gtp-remat-opt-in-modules
        --gtp-remat-reduce-scatter-with-fp32-accumulation
        """,
    ),
    Refusal(
        "context parallelism has one level here",
        "context parallelism has one level",
        flags="--hierarchical-context-parallel-sizes --hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
    ),
    Refusal(
        "distributed recompute is not built here",
        "each rank keeps the activations that it recomputes from",
        flags="--distribute-saved-activations --distribute-checkpointed-activations",
    ),
    Refusal(
        "replicas must start from equal weights",
        "all replicas start from equal weights",
        flags="--data-parallel-random-init",
    ),
    Refusal(
        "give --distributed-timeout-seconds",
        "--distributed-timeout-seconds holds from the start",
        flags="--distributed-timeout-seconds-after-init",
    ),
    Refusal("the ranks are real ones", "the ranks are real ones", flags="--fake-process-group --test-mode"),
    Refusal(
        "restarts inside the process, NVIDIA's fault tolerance package and its autoresume are not built here: "
        "docs/faults.md says what is",
        "faults are handled as in docs/faults.md",
        flags="--inprocess-restart --enable-ft-package --adlr-autoresume",
        parts="""
        --inprocess-active-world-size --inprocess-barrier-timeout --inprocess-completion-timeout
        --inprocess-empty-cuda-cache --inprocess-granularity --inprocess-hard-timeout --inprocess-heartbeat-interval
        --inprocess-heartbeat-timeout --inprocess-last-call-wait --inprocess-max-iterations
        --inprocess-monitor-process-interval --inprocess-monitor-thread-interval
        --inprocess-progress-watchdog-interval --inprocess-soft-timeout --inprocess-termination-grace-time
        --calc-ft-timeouts --ft-num-warmup-iters
        """,
    ),
    Refusal(
        "no faults are injected",
        "no faults are injected",
        flags="""
        --fault-injector-delay-start-iteration --fault-injector-fault-delay --fault-injector-fault-probabilities
        --fault-injector-fault-types --fault-injector-mtti-seconds --fault-injector-num-ranks
        --fault-injector-offset-seconds --fault-injector-ranks --fault-injector-seed
        """,
    ),
    Refusal(
        "a stop is asked for by a signal; see docs/faults.md",
        "no file asks for a stop, signals do",
        flags="--trigger-path",
    ),
    # ---- batch, data, length
    Refusal(
        "a batch that does not divide is refused, with the sizes that work",
        "the batch is as given",
        flags="--decrease-batch-size-if-needed",
    ),
    Refusal(
        "an evaluation takes batches of the size of training, --eval-iters of them, from the start of the run on",
        "an evaluation takes --eval-iters global batches",
        flags="""
        --eval-global-batch-size --eval-micro-batch-size --start-eval-at-iter --full-validation
        """,
    ),
    Refusal(
        "validation sets of their own are named in --valid-data-path: NAME=PREFIX NAME=PREFIX",
        "--valid-data-path is one set, if it names none",
        flags="--multiple-validation-sets --validation-set-names",
    ),
    Refusal(
        "skipping iterations or calling them otherwise would change the order of samples",
        "every sample of the order is used",
        flags="--iterations-to-skip --override-ckpt-iteration",
    ),
    Refusal(
        "phases of the data are not built: give each its own run with --finetune or another --data-path",
        "one blend of corpora for the whole run",
        flags="--phase-transition-iterations",
    ),
    Refusal(
        "documents are kept apart by --reset-attention-mask and --reset-position-ids",
        "the attention sees the other documents in a sample, unless --reset-attention-mask is given",
        flags="--dataloader-inter-document-masking",
    ),
    Refusal(
        "fill-in-the-middle data is not built here",
        "samples are used as they are",
        flags="--fim-data",
        parts="""
        --fim-eod-token --fim-fragment-rate --fim-middle-token --fim-no-prefix --fim-pad-token --fim-prefix-token
        --fim-rate --fim-split-sample --fim-spm-rate --fim-suffix-token
        """,
    ),
    Refusal(
        "fine-tuning on dialogues is not built here",
        "samples are plain text",
        flags="--sft",
        parts="--sft-tokenizer-prompt-format",
    ),
    Refusal(
        "the tokenizer is --tokenizer-model with its own special tokens and end of document",
        "the tokenizer's files alone define it",
        flags="""
        --tokenizer-special-tokens --tokenizer-metadata --null-tokenizer-eod-id
        """,
    ),
    Refusal(
        "tiktoken's files are not read here: give the tokenizer.json of the model with --tokenizer-type "
        "HuggingFaceTokenizer",
        "the tokenizer's files alone define it",
        flags="""
        --tiktoken-pattern --tiktoken-num-special-tokens --tiktoken-special-tokens
        """,
    ),
    Refusal("give --tokenizer-model", "the tokenizer is --tokenizer-model", flags="--vocab-file --merge-file"),
    # ---- the loss
    Refusal("z-loss is --z-loss-coeff with its coefficient here", "no z-loss", flags="--use-z-loss"),
    Refusal(
        "every token counts in the loss, but for --eod-mask-loss",
        "every token counts in the loss",
        flags="""
        --goldfish-loss
        """,
        parts="--goldfish-k --goldfish-h",
    ),
    Refusal(
        "losses and gradients are logged, not judged; see --clip-grad and --edit-anomaly-threshold",
        "losses and gradients are logged, not judged",
        flags="--check-for-spiky-loss --check-for-large-grads",
    ),
    Refusal(
        "reinforcement learning is not built here",
        "the model predicts the next token of a corpus",
        flags="--perform-rl-step",
        parts="""
        --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-default-temperature --grpo-default-top-p
        --grpo-entropy-term-weight --grpo-filter-groups-with-same-reward --grpo-group-size --grpo-iterations
        --grpo-kl-beta --grpo-prompts-per-step --langrl-env-config --langrl-external-server
        --no-langrl-external-server --langrl-inference-server-conversation-template --langrl-inference-server-type
        --refit-method --rl-calculate-intra-group-similarity --no-rl-calculate-intra-group-similarity
        --rl-consumption-granularity --rl-default-temperature --rl-default-top-k --rl-default-top-p
        --rl-durable-rollout-bank --rl-generation-batch-size --rl-generation-lag
        --rl-importance-sampling-truncation-coef --rl-inference-expert-model-parallel-size
        --rl-inference-expert-tensor-model-parallel-size --rl-inference-logprobs-is-correction
        --no-rl-inference-logprobs-is-correction --rl-inference-model-unified-memory-level --rl-inference-parsers
        --rl-inference-pipeline-model-parallel-size --rl-inference-tensor-model-parallel-size
        --rl-kv-cache-management-mode --rl-max-inflight-requests --rl-num-parallel-generation-batches
        --rl-num-parallel-generations --rl-offload-inference-model-weights-when-idle
        --no-rl-offload-inference-model-weights-when-idle --rl-offload-kv-cache-during-training
        --no-rl-offload-kv-cache-during-training --rl-offload-optimizer-during-inference
        --rl-parallel-generation-tasks --rl-partial-rollouts --no-rl-partial-rollouts --rl-persist-cuda-graphs
        --no-rl-persist-cuda-graphs --rl-profile --rl-profile-dir --rl-prompts-per-eval
        --rl-remove-kv-cache-during-training --no-rl-remove-kv-cache-during-training --rl-reset-cuda-graphs
        --no-rl-reset-cuda-graphs --rl-rollout-bank-dir --rl-rollout-bank-max-bytes --rl-sequence-packing-algo
        --rl-sequence-packing-bin-size --rl-sequence-packing-max-sequences-per-bin --rl-skip-bos-token
        --no-rl-skip-bos-token --rl-submission-granularity --rl-training-cuda-graphs --no-rl-training-cuda-graphs
        --rl-use-sequence-packing --no-rl-use-sequence-packing --rl-verify-model-weights-swap
        --no-rl-verify-model-weights-swap
        """,
    ),
    Refusal(
        "distillation is not built here",
        "the loss is that of the corpus alone; no logits are saved",
        flags="--logits-load-dir --logits-save-dir",
        parts="""
        --logits-load-decode-threads --logits-load-ignore-errors --logits-load-kd-loss-alpha
        --logits-load-msc-prefetch-depth --logits-load-prefetch-factor --logits-save-dtype --logits-save-top-k
        --logits-save-top-p --logits-save-top-p-min-k
        """,
    ),
    Refusal(
        "ModelOpt (quantisation, distillation, its data sets) is not built here",
        "the model is trained from a corpus, and not quantised",
        flags="""
        --export-model-type --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-force-local-attention --export-kv-cache-quant --export-real-quant-cfg --export-quant-cfg
        --export-kd-teacher-load --export-kd-teacher-model-config --export-kd-teacher-ckpt-format --export-kd-cfg
        --finetune-hf-dataset --finetune-data-split --finetune-data-files --qad-train-target --freeze-base-for-mtp
        --export-qk-l2-norm --export-moe-apply-probs-on-input --export-offline-model --modelopt-enabled
        --enable-gpt-oss
        """,
    ),
    # ---- checkpoints, and other ways to say things
    Refusal(
        "a full checkpoint holds everything that a resume needs; see --save-scope compact",
        "checkpoints hold optimizer and random state",
        flags="--no-save-optim --no-save-rng",
    ),
    Refusal(
        "give --keep-checkpoints N, the number of newest ones that stay",
        "all checkpoints stay, or the newest --keep-checkpoints",
        flags="--save-retain-interval",
    ),
    Refusal(
        "checkpoints of two kinds are not built; --async-save writes while training goes on",
        "--save-interval saves everything",
        flags="--non-persistent-save-interval --replication",
        parts="""
        --non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-algo
        --non-persistent-local-ckpt-dir --replication-factor --replication-jump
        """,
    ),
    Refusal(
        "a load makes checks of its own (docs/checkpoints.md)",
        "checkpoints are checked as docs/checkpoints.md says",
        flags="--verify-integrity",
    ),
    Refusal(
        "the model and the layout are described by the flags given now",
        "the flags given now hold",
        flags="--use-checkpoint-args --use-mp-args-from-checkpoint-args",
    ),
    Refusal(
        "tools/convert_checkpoint.py converts; then --load DIR --finetune",
        "no other checkpoint is loaded",
        flags="""
        --pretrained-checkpoint --ckpt-convert-format --ckpt-convert-save
        --ckpt-convert-update-legacy-dist-opt-format --load-model-opt-format
        """,
    ),
    Refusal(
        "with --no-load-optim the masters start from the loaded weights",
        "masters start from the loaded weights",
        flags="--load-main-params-from-ckpt",
    ),
    Refusal("tools/evaluate.py evaluates a checkpoint", "the run trains", flags="--skip-train"),
    Refusal("give --config FILE.yaml", "no file of settings is read", flags="--yaml-cfg"),
    Refusal(
        "give --recompute-granularity full --recompute-method uniform --recompute-num-layers N",
        "activations are kept",
        flags="--checkpoint-activations --checkpoint-num-layers",
    ),
)
