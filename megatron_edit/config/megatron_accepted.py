"""Megatron-LM's flags that change nothing here, or nothing with one value; read by `megatron_flags.py`.

The names are those of `megatron/training/arguments.py` from v1.0 to what follows core 0.19 (a unit test holds the list
of each release), and a few of well-known forks. What is not here is a setting, translated, or in
`megatron_refused.py`.
"""

from __future__ import annotations

# accepted: switches, and flags with values, that change nothing in what is computed here
SWITCHES_WITHOUT_EFFECT = """
    --use-mcore-models --swiglu --group-query-attention --disable-bias-linear --no-position-embedding
    --use-rotary-position-embeddings --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --exit-on-missing-checkpoint --use-dist-ckpt --use-cpu-initialization --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --mmap-warmup --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
    --calculate-per-token-loss --fp32-allreduce --ddp-reduce-scatter-with-fp32-accumulation
    --use-precision-aware-optimizer --exit-signal-handler-for-training --exit-signal-handler-for-dataloader
    --allow-ambiguous-pad-tokens --renormalize-blend-weights --use-mpi --lazy-mpu-init --init-model-with-meta-device
    --no-initialization --te-rng-tracker --inference-rng-tracker

    --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save
    --ckpt-fully-parallel-load --ckpt-fully-parallel-load-per-rank-objects --ckpt-assume-constant-structure
    --ckpt-drop-redundant-extra-state --ckpt-pg-tensors-cache-create --auto-detect-ckpt-format
    --async-ckpt-use-cpu-shm --use-persistent-ckpt-worker --dist-ckpt-optim-fully-reshardable
    --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient
    --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
    --no-stream-ckpt-dequant --disable-stream-ckpt-dequant --no-save-tokenizer-assets --disable-save-tokenizer-assets
    --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args

    --use-flash-attn --attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling
    --no-masked-softmax-fusion --no-scaled-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --apply-rope-fusion --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --cross-entropy-loss-fusion --fused-residual-rmsnorm --use-te-activation-func
    --use-fused-weighted-squared-relu --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
    --use-transformer-engine-op-fuser --disable-jit-fuser --enable-experimental
    --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph --decode-only-cuda-graphs

    --no-gradient-reduce-div-fusion --no-async-tensor-model-parallel-allreduce
    --disable-async-tensor-model-parallel-allreduce --tp-comm-overlap --tp-comm-overlap-rs-dgrad
    --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
    --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs
    --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad
    --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
    --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush --use-ring-exchange-p2p
    --no-scatter-gather-tensors-in-pipeline --defer-embedding-wgrad-compute --delay-wgrad-compute
    --no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather --delay-param-gather
    --no-delay-grad-reduce --overlap-param-gather-with-optimizer-step --ddp-average-in-collective
    --ddp-pad-buckets-for-high-nccl-busbw --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp
    --no-use-layer-wise-param-layout --use-nccl-ub --disable-symmetric-registration --use-sharp
    --disable-gloo-process-groups --create-all-gather-group --high-priority-a2a-comm-stream
    --manual-gc --no-manual-gc-eval --disable-manual-gc-eval --enable-msc --disable-msc

    --log-params-norm --log-num-zeros-in-grad --log-progress --log-validation-ppl-to-tensorboard
    --log-timers-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard
    --log-batch-size-to-tensorboard --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard
    --no-log-learnig-rate-to-tensorboard --log-device-memory-used --log-energy --log-max-attention-logit
    --no-one-logger --enable-one-logger --one-logger-async --otel-enabled --profile --use-pytorch-profiler
    --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes
    --nvtx-ranges --record-shapes --record-memory-history --run-workload-inspector-server
    --log-straggler --disable-straggler-on-startup --no-check-for-nan-in-loss-and-grad --no-barrier-with-level-1-timing
    --flight-recorder-include-stack-trace --no-flight-recorder-dump-on-timeout
    --disable-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec
    --disable-flight-recorder-extra-dump-on-exec --no-flight-recorder-include-only-active
    --disable-flight-recorder-include-only-active

    --legacy-tokenizer --use-gigatoken --trust-remote-code --tokenizer-sentencepiece-legacy
    --no-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
    --tokenizer-hf-use-fast --tokenizer-hf-no-use-fast --tokenizer-hf-include-special-tokens
    --tokenizer-hf-no-include-special-tokens

    --flash-decode --cache-mla-latents --use-legacy-static-engine --nccl-all-reduce-for-prefill
    --enable-chunked-prefill --disable-chunked-prefill --inference-cuda-graph-all-prefills
    --inference-disable-ep-consensus --no-inference-disable-ep-consensus --inference-disable-triton-nvls-kernels
    --inference-dynamic-batching --inference-dynamic-batching-prefix-caching
    --no-inference-dynamic-batching-prefix-caching --inference-dynamic-batching-track-generated-token-events
    --inference-dynamic-batching-track-paused-request-events --inference-fuse-tp-communication
    --inference-moe-disable-fused-quant-kernels --inference-text-gen-server-logging
    --no-inference-text-gen-server-logging --inference-use-synchronous-zmq-collectives
    --no-inference-use-synchronous-zmq-collectives --inference-wandb-logging --no-inference-wandb-logging
    --use-same-sampling-seed-across-dp-ranks

    --bert-no-binary-head --biencoder-shared-query-context-model --faiss-use-gpu --no-data-sharding
    --dino-norm-last-layer --output-bert-embeddings --retriever-score-scaling --use-one-sent-docs --vision-pretraining
"""
VALUES_WITHOUT_EFFECT = """
    --local-rank --local_rank --distributed-backend --DDP-impl --num-dataset-builder-threads --data-cache-path
    --mid-level-dataset-surplus --per-dataset-sequences-path --object-storage-cache-path --s3-cache-path
    --train-sync-interval --microbatch-group-size-per-virtual-pipeline-stage --wgrad-deferral-limit
    --ddp-param-name-patterns-for-fp32-local-accumulation --check-weight-hash-across-dp-replicas-interval
    --adlr-autoresume-interval --error-injection-type

    --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-process-group
    --ckpt-fully-parallel-save-process-group --ckpt-pg-tensors-cache-path --dist-ckpt-workers --async-strategy
    --async-ckpt-cpu-priority --async-ckpt-io-priority

    --attention-backend --flash-attention-version --qknorm-impl --cross-entropy-fusion-impl --symmetric-ar-type
    --scaled-upper-triang-masked-softmax-fusion --cuda-graph-impl --cuda-graph-modules --cuda-graph-scope
    --cuda-graph-warmup-steps --mlp-chunks-for-training --mlp-chunks-for-prefill
    --ddp-bucket-size --ddp-num-buckets --nccl-communicator-config-path --high-priority-stream-groups
    --sharp-enabled-group --pipeline-model-parallel-comm-backend --tp-comm-bootstrap-backend --tp-comm-overlap-cfg
    --manual-gc-interval --empty-unused-memory-level

    --timing-log-level --timing-log-option --tensorboard-log-interval --tensorboard-queue-size --log-memory-interval
    --wandb-save-dir --wandb-exp-name --wandb-entity --wandb-name --logging-level --config-logger-dir
    --app-tag-run-name --app-tag-run-version --one-logger-project --one-logger-run-name --one-logger-entity
    --otel-service-name --otel-span-groups --profile-step-start --profile-step-end --profile-ranks
    --memory-snapshot-path --straggler-ctrlr-port --straggler-minmax-count --gpu-sniff-test-interval
    --result-rejected-tracker-filename --flight-recorder-dump-path --flight-recorder-trace-buffer-size
    --dump-param-to-param-group-map --save-activations-interval --save-dgrads-interval --save-params-interval
    --save-tokens-per-expert-interval --save-wgrads-interval --chat-template

    --inference-batch-times-seqlen-threshold --inference-coordinator-port --inference-cuda-graph-max-tokens
    --inference-cuda-graph-scope --inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-block-size
    --inference-dynamic-batching-buffer-guaranteed-fraction --inference-dynamic-batching-buffer-overflow-factor
    --inference-dynamic-batching-buffer-size-gb --inference-dynamic-batching-chunk-size
    --inference-dynamic-batching-cuda-graph-max-tokens --inference-dynamic-batching-cuda-graph-mixed-prefill-count
    --inference-dynamic-batching-cuda-graph-sizing-distribution --inference-dynamic-batching-logprobs-mode
    --inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-max-requests
    --inference-dynamic-batching-max-requests-override --inference-dynamic-batching-max-tokens
    --inference-dynamic-batching-max-tokens-override --inference-dynamic-batching-num-cuda-graphs
    --inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-prefix-caching-coordinator-policy
    --inference-dynamic-batching-prefix-caching-eviction-policy --inference-dynamic-batching-prefix-caching-mamba-gb
    --inference-dynamic-batching-prefix-caching-routing-alpha --inference-dynamic-batching-sampling-backend
    --inference-dynamic-batching-unified-memory-level --inference-grouped-gemm-backend
    --inference-logging-step-interval --inference-max-batch-size --inference-max-requests --inference-max-seq-length
    --inference-moe-token-dispatcher-type --inference-shards --max-tokens-to-oom --num-speculative-tokens

    --bert-embedder-type --bert-load --biencoder-projection-dim --block-data-path --classes-fraction
    --data-per-class-fraction --dino-bottleneck-size --dino-freeze-last-layer --dino-head-hidden-size
    --dino-local-crops-number --dino-local-img-size --dino-teacher-temp --dino-warmup-teacher-temp
    --dino-warmup-teacher-temp-epochs --embedding-path --evidence-data-path --head-lr-mult --ict-head-size --ict-load
    --img-dim --img-h --img-w --indexer-batch-size --indexer-log-interval --iter-per-epoch --mask-factor --mask-prob
    --mask-type --num-channels --num-classes --patch-dim --query-in-block-prob --relative-attention-max-distance
    --relative-attention-num-buckets --report-topk-accuracies --retriever-report-topk-accuracies
    --retriever-seq-length --sample-rate --short-seq-prob --swin-backbone-type --titles-data-path
    --vision-backbone-type --vision-pretraining-type
"""

# accepted with a value that is what happens here: flag -> (values, why no other)
_DENSE = "the model is a dense Llama"
_CHECKPOINTS = "checkpoints have a format of their own (docs/checkpoints.md)"
_GRADIENTS, _MASTERS, _MOMENTS = (
    "gradients are added up in fp32",
    "master weights are fp32: the sync subtracts them",
    "Adam's moments are fp32",
)
ONE_VALUE: dict[str, tuple[str, str]] = {
    "--normalization": ("RMSNorm", "the norms are RMSNorm"),
    "--position-embedding-type": ("rope", "positions are rotary embeddings"),
    "--rope-type": ("rope", "positions are rotary embeddings, without YaRN"),
    "--rotary-percent": ("1.0", "the rotary embedding covers the whole head"),
    "--softmax-type": ("vanilla", "the attention's softmax is the usual one"),
    "--glu-linear-offset": ("0", "the MLP is SwiGLU"),
    "--mtp-num-layers": ("0", "multi-token prediction is not built here"),
    "--optimizer": ("adam", "the inner optimizer is AdamW"),
    "--weight-decay-incr-style": ("constant", "the weight decay is constant"),
    "--expert-model-parallel-size": ("1", _DENSE),
    "--expert-tensor-parallel-size": ("1", _DENSE),
    "--encoder-tensor-model-parallel-size": ("0", _DENSE),
    "--encoder-pipeline-model-parallel-size": ("0", _DENSE),
    "--ckpt-format": ("torch_dist", _CHECKPOINTS),
    "--dist-ckpt-format": ("torch_dist", _CHECKPOINTS),
    "--dist-ckpt-strictness": (
        "assume_ok_unexpected raise_unexpected raise_all", "a checkpoint holds exactly the model's tensors",
    ),
    "--dataloader-type": ("single", "the order of samples is one of its own (docs/batch-and-data.md)"),
    "--data-impl": ("mmap infer", "corpora are read as memory maps"),
    "--num-distributed-optimizer-instances": (
        "1", "the distributed optimizer shards inside a replica; set the replicas with --edit-num-replicas",
    ),
    "--data-parallel-sharding-strategy": ("no_shard", "the distributed optimizer shards inside a replica"),
    "--main-grads-dtype": ("fp32", _GRADIENTS),
    "--main-params-dtype": ("fp32", _MASTERS),
    "--exp-avg-dtype": ("fp32", _MOMENTS),
    "--exp-avg-sq-dtype": ("fp32", _MOMENTS),
    "--cp-comm-type": ("p2p", "context parallelism uses point-to-point communication"),
    "--recompute-modules": ("core_attn", "--recompute-granularity selective recomputes the attention"),
    "--cpu-offloading-num-layers": ("0", "activations stay on the device"),
    "--rerun-mode": ("disabled", "results are not computed a second time to look for faults"),
    "--error-injection-rate": ("0", "no faults are injected"),
    "--exit-signal": ("SIGTERM SIGINT SIGUSR1", "SIGTERM, SIGINT and SIGUSR1 save and stop"),
    "--vocab-extra-ids": ("0", "the vocabulary is that of the tokenizer"),
    "--null-tokenizer-pad-id": ("-1", "no id is a padding that the loss leaves out"),
}  # fmt: skip
# The same, but without effect unless another flag is given: flag -> (values, why no other, that flag).
ONE_VALUE_BESIDE: dict[str, tuple[str, str, str]] = {
    "--initial-loss-scale": ("4294967296", "--fp16 begins with a loss scale of 2^32", "--fp16"),
    "--min-loss-scale": ("1", "--fp16 keeps the loss scale at 1 or more", "--fp16"),
    "--min-scale": ("1", "--fp16 keeps the loss scale at 1 or more", "--fp16"),
    "--loss-scale-window": ("1000", "--fp16 doubles the loss scale after 1000 good steps", "--fp16"),
    "--hysteresis": ("2", "--fp16 halves the loss scale at the second overflow", "--fp16"),
}
