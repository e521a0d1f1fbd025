"""Arguments in the style of public launch scripts of Megatron-LM: what they meet here, and that what a refusal offers
works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_edit.config.configure import configure
from megatron_edit.config.notes import notes
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import ConfigError

NVIDIA_LLAMA3_8B_FP8 = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
    --transformer-impl transformer_engine --apply-layernorm-1p --untie-embeddings-and-output-weights
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125
    --lr-decay-samples 1949218
    --lr-warmup-samples 3906 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
    --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --data-cache-path CACHE
    --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
    --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4
    --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save SAVE --load SAVE
    --tensorboard-dir BOARD
"""
LLM_JP_13B = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --seq-length 4096
    --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 --train-iters 61000
    --tokenizer-type Llama2Tokenizer --tokenizer-model TOKENIZER --train-data-path 100 DATA/ja 200 DATA/en
    --load SAVE --save SAVE --distributed-backend nccl --init-method-std 0.02 --lr 2.0E-4 --min-lr 2.0E-5
    --lr-decay-style cosine --lr-decay-iters 61000 --weight-decay 0.1 --clip-grad 1.0 --lr-warmup-iters 2000
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 500 --eval-iters 0
    --bf16 --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear
    --use-mcore-models --normalization RMSNorm --norm-epsilon 1e-5 --no-masked-softmax-fusion --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --use-flash-attn --recompute-activations --recompute-granularity selective
    --attention-softmax-in-fp32 --no-query-key-layer-scaling --transformer-impl local --use-mpi --log-throughput
    --wandb-name llm-jp-13b --wandb-project llm --wandb-entity llm-jp
"""
SWISS_AI_8B = """
    --transformer-impl local --use-precision-aware-optimizer --main-grads-dtype fp32 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --rope-scaling-factor 8 --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu
    --untie-embeddings-and-output-weights --log-throughput --log-progress --tensorboard-dir BOARD
    --no-log-loss-scale-to-tensorboard --log-memory-to-tensorboard --attention-dropout 0.0 --hidden-dropout 0.0
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --micro-batch-size 1
    --global-batch-size 512 --no-check-for-nan-in-loss-and-grad --train-iters 10000 --log-interval 1 --eval-iters 0
    --cross-entropy-loss-fusion --disable-bias-linear --optimizer adam --dataloader-type single --manual-gc
    --manual-gc-interval 500 --exit-signal-handler --trigger-path RUN --seed 28 --init-method-std 0.008944
    --lr 0.00022 --min-lr 0.000022 --lr-decay-style cosine --lr-warmup-iters 2000 --save SAVE --save-interval 1000
    --ckpt-format torch_dist --load SAVE --async-save --bf16 --tensor-model-parallel-size 4 --sequence-parallel
    --pipeline-model-parallel-size 1 --context-parallel-size 1 --wgrad-deferral-limit 50 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER
    --split 100,0,0 --seq-length 8192 --reset-position-ids --reset-attention-mask --eod-mask-loss --num-workers 1
    --num-dataset-builder-threads 1 --goldfish-loss --goldfish-k 50 --goldfish-h 50 --data-cache-path CACHE
    --data-path DATA/one DATA/two --wandb-project swiss --wandb-exp-name llama3-8b --wandb-save-dir RUN
"""
QWEN3_8B = """
    --use-mcore-models --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 4096
    --max-position-embeddings 40960 --make-vocab-size-divisible-by 128 --position-embedding-type rope
    --rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.02
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash --micro-batch-size 1
    --global-batch-size 256 --train-samples 268554688 --lr-decay-samples 255126953 --lr-warmup-samples 162761
    --lr-warmup-init 1e-7 --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --attention-softmax-in-fp32 --no-masked-softmax-fusion
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective --recompute-modules core_attn
    --moe-token-dispatcher-type alltoall --no-create-attention-mask-in-dataloader --transformer-impl local
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER --data-path DATA/c4 --split 99,1,0
    --eval-interval 1000 --eval-iters 32 --save-interval 500 --save SAVE --load SAVE --log-interval 1
    --log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm
    --log-validation-ppl-to-tensorboard --log-throughput --tensorboard-dir BOARD --logging-level 40
    --distributed-timeout-minutes 60 --dist-ckpt-strictness log_all --auto-detect-ckpt-format --inference-rng-tracker
"""
EDIT = "--edit-num-replicas 2 --edit-sync-interval 128 --edit-warmup-steps 1000 --dry-run"
# script -> parts of the problems, in their order
SCRIPTS = {
    "NVIDIA's Llama-3 8B in FP8": (NVIDIA_LLAMA3_8B_FP8, [
        "--apply-layernorm-1p is refused: the weights of the norms",
        "--decoupled-lr 5.0e-4, --decoupled-min-lr 4.5e-5 are refused",
        "--grad-reduce-in-bf16 is refused",
        "--fp8-format hybrid, --fp8-amax-history-len 1024, --fp8-amax-compute-algo max, --fp8-param-gather are refused",
        "--tiktoken-pattern v2 is refused: tiktoken's files are not read here",
    ]),
    "llm-jp 13B": (LLM_JP_13B, []),
    "swiss-ai 8B": (SWISS_AI_8B, [
        "--trigger-path RUN is refused",
        "--goldfish-loss, --goldfish-k 50, --goldfish-h 50 are refused",
    ]),
    "Qwen3 8B": (QWEN3_8B, ["--dist-ckpt-strictness log_all is refused"]),
}  # fmt: skip


def run(argv: list[str], folder: Path) -> ResolvedConfig:
    """As 16 ranks with GPUs, with every folder below `folder`."""
    places = {"SAVE": folder / "save", "CACHE": folder / "cache", "BOARD": folder / "board", "TOKENIZER": folder}
    argv = [str(places.get(word, word)) for word in argv]
    config = configure(argv, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "cuda")
    assert config is not None and config.batch_plan.num_replicas == 2
    return config


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_meets(name: str, tmp_path: Path) -> None:
    text, expected = SCRIPTS[name]
    argv = [*text.split(), *EDIT.split()]
    if expected:
        with pytest.raises(ConfigError) as error:
            run(argv, tmp_path)
        problems, advice = error.value.problems, error.value.advice
        assert len(problems) == len(expected), problems
        assert all(part in problem for part, problem in zip(expected, problems, strict=True)), problems
        assert advice[0] == "the same without the refused flags:" and len(advice) > 2 + len(expected)
        command = advice[1 : advice.index("what it does, where Megatron-LM would do as the flags say:")]
        argv = shlex.split("\n".join(command).replace("\\\n", ""))[1:]
    config = run(argv, tmp_path)
    (accepted,) = [note for note in notes(config) if note.startswith("Megatron-LM flags that make no difference here")]
    assert "--swiglu" in accepted and "--use-distributed-optimizer" in accepted


@pytest.mark.parametrize(
    ("name", "is_of_the_hub"),
    [("Qwen/Qwen3-8B", True), ("alehc/swissai-tokenizer", True), ("./Qwen/Qwen3-8B", False), ("/a/b", False),
     ("tokenizer.model", False), ("a/b/c", False), ("here/tokenizer.json", False)],
)  # fmt: skip
def test_a_tokenizer_that_is_a_name_on_the_hub(name: str, is_of_the_hub: bool, monkeypatch: pytest.MonkeyPatch,
                                               tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    flags = "--data-path x --train-iters 8 --global-batch-size 8 --tokenizer-type HuggingFaceTokenizer "
    flags += f"--tokenizer-model {name}"
    with pytest.raises(ConfigError) as error:
        configure(flags.split(), {}, "cpu")
    (problem,) = error.value.problems
    assert problem.startswith(f"--tokenizer-model {name} does not exist")
    assert ("hub" in problem and f"hf download {name} " in problem) is is_of_the_hub
