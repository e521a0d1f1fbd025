"""Checks of a config against the ranks: every message names the numbers and a value that then really
works."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_edit.config import (
    Config,
    ConfigError,
    ResolvedConfig,
    check,
    configure,
    describe,
    notes,
    resolve,
)
from megatron_edit.config.flags import load_config
from megatron_edit.config.printing import print_config
from megatron_edit.config.schema import DataConfig, ParallelConfig, TrainingConfig
from megatron_edit.tables.methods import METHODS

BASE = "--mock-data --train-iters 100 --edit-sync-interval 10"


def problems_of(flags: str, world_size: int = 4, local_world_size: int | None = None, device: str = "cpu") -> list[str]:
    return check(load_config(flags.split()), world_size, local_world_size or world_size, device)


def resolved(
    flags: str, world_size: int = 4, local_world_size: int | None = None, device: str = "cpu"
) -> ResolvedConfig:
    config = load_config(flags.split())
    local_world_size = local_world_size or world_size
    assert check(config, world_size, local_world_size, device) == []
    return resolve(config, world_size, local_world_size, device)


def size_flags(tp: int, pp: int, replicas: int, micro: int, batch: int) -> str:
    return (
        f"{BASE} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--edit-num-replicas {replicas} --micro-batch-size {micro} --global-batch-size {batch}"
    )


@dataclass(frozen=True)
class Sizes:
    """One row of field report B08."""

    world: int
    tp: int
    pp: int
    replicas: int
    micro: int
    batch: int
    microbatches: int = 0
    named: tuple[int, ...] = ()  # numbers that the message must name
    fix: dict[str, int] = field(default_factory=dict)  # a value that the message offers


VALID = [
    Sizes(1, 1, 1, 1, 1, 1, microbatches=1),
    Sizes(1, 1, 1, 1, 2, 8, microbatches=4),
    Sizes(2, 1, 1, 2, 2, 8, microbatches=2),
    Sizes(2, 2, 1, 1, 2, 8, microbatches=4),
    Sizes(3, 1, 1, 3, 1, 9, microbatches=3),
    Sizes(3, 1, 1, 1, 2, 6, microbatches=1),
    Sizes(4, 2, 1, 2, 2, 8, microbatches=2),
    Sizes(4, 1, 2, 2, 4, 8, microbatches=1),
    Sizes(4, 1, 1, 2, 2, 8, microbatches=1),
    Sizes(8, 2, 2, 2, 1, 10, microbatches=5),
    Sizes(8, 1, 1, 4, 2, 48, microbatches=3),
    Sizes(64, 8, 2, 4, 4, 512, microbatches=32),
]

INVALID = [
    Sizes(2, 1, 1, 2, 4, 10, named=(10, 4, 2, 8), fix={"batch": 16}),
    Sizes(2, 1, 1, 1, 4, 10, named=(10, 4, 2, 8), fix={"micro": 5}),
    Sizes(3, 2, 1, 1, 1, 4, named=(3, 2), fix={"world": 2}),
    Sizes(4, 1, 1, 3, 1, 12, named=(3, 4), fix={"replicas": 4}),
    Sizes(4, 1, 1, 2, 4, 8, named=(8, 4, 16), fix={"batch": 16}),
    Sizes(1, 1, 1, 2, 1, 2, named=(2, 1), fix={"world": 2}),
    Sizes(6, 2, 2, 1, 1, 6, named=(6, 4, 2), fix={"world": 8, "batch": 8}),
    Sizes(8, 2, 1, 3, 1, 12, named=(3, 4, 8, 2), fix={"world": 12}),
    Sizes(4, 1, 1, 8, 1, 8, named=(8, 4), fix={"replicas": 2}),
    Sizes(4, 2, 1, 2, 2, 6, named=(6, 2, 4), fix={"batch": 8}),
    Sizes(6, 1, 1, 3, 1, 8, named=(8, 6), fix={"batch": 12}),
    Sizes(1, 2, 2, 1, 1, 1, named=(1, 2, 4), fix={"world": 4}),
]


@pytest.mark.parametrize("row", VALID, ids=str)
def test_valid_sizes(row: Sizes) -> None:
    config = resolved(size_flags(row.tp, row.pp, row.replicas, row.micro, row.batch), row.world)
    plan = config.batch_plan
    assert (plan.num_microbatches, plan.global_batch_size) == (row.microbatches, row.batch)
    assert plan.shard_size * plan.num_replicas * row.tp * row.pp == row.world
    assert plan.replica_batch_size * row.replicas == row.batch == config.training.global_batch_size
    assert f"x {row.microbatches} microbatches" in describe(config)


@pytest.mark.parametrize("row", INVALID, ids=str)
def test_invalid_sizes(row: Sizes) -> None:
    sizes = {"tp": row.tp, "pp": row.pp, "replicas": row.replicas, "micro": row.micro, "batch": row.batch}
    (problem,) = problems_of(size_flags(**sizes), row.world)
    numbers = {int(n) for n in re.findall(r"\d+", problem)}
    assert numbers >= set(row.named), problem
    assert numbers >= set(row.fix.values()) - {row.batch}, problem
    fixed = {**sizes, "world": row.world, **row.fix}
    assert problems_of(size_flags(**{k: v for k, v in fixed.items() if k != "world"}), fixed["world"]) == []


def test_global_batch_stays_on_a_resize() -> None:
    flags = f"{BASE} --micro-batch-size 2 --global-batch-size 16 --edit-num-replicas"
    for world, replicas, microbatches in ((2, 2, 4), (4, 4, 2), (8, 4, 1)):
        plan = resolved(f"{flags} {replicas}", world).batch_plan
        assert (plan.global_batch_size, plan.num_microbatches) == (16, microbatches)


def test_replica_batch_makes_the_global_batch_grow() -> None:
    for replicas in (1, 2, 3):
        flags = f"{BASE} --micro-batch-size 2 --replica-batch-size 8 --edit-num-replicas {replicas}"
        config = resolved(flags, 2 * replicas)
        assert config.training.global_batch_size == 8 * replicas
        assert config.sources["global_batch_size"] == "derived"


def test_resolve_is_repeatable_and_derives_anew_for_other_ranks() -> None:
    config = load_config(f"{BASE} --replica-batch-size 8".split())
    four = resolve(config, 4, 2, "cpu")
    assert resolve(four, 4, 2, "cpu") == four
    assert (four.edit.edit_num_replicas, four.training.global_batch_size) == (2, 16)
    eight = resolve(four, 8, 2, "cpu")
    assert (eight.edit.edit_num_replicas, eight.training.global_batch_size) == (4, 32)
    assert eight == resolve(config, 8, 2, "cpu")


@pytest.mark.parametrize(
    ("world", "local", "tp", "pp", "replicas"),
    [
        (8, 8, 1, 1, 1),
        (16, 8, 8, 1, 2),
        (16, 8, 4, 1, 2),
        (32, 8, 8, 2, 2),
        (64, 8, 2, 1, 8),
        (4, 1, 1, 2, 2),
    ],
)
def test_default_replicas_are_nodes_by_nodes_of_a_copy(world: int, local: int, tp: int, pp: int, replicas: int) -> None:
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    config = resolved(f"{BASE} {sizes} --replica-batch-size 64", world, local)
    assert config.edit.edit_num_replicas == replicas
    assert config.sources["edit_num_replicas"] == "derived"


def test_replicas_that_cannot_be_derived_are_asked_for() -> None:
    # 3 nodes of 4 ranks, copies of 6 ranks: two nodes for each replica, and one is left over
    flags = f"{BASE} --num-layers 6 --pipeline-model-parallel-size 6 --replica-batch-size 8"
    (problem,) = problems_of(flags, 12, 4)
    assert "--edit-num-replicas is not given" in problem and "these would work: 1, 2" in problem
    (problem,) = problems_of(f"{BASE} --replica-batch-size 8", 12, 5)
    assert "--edit-num-replicas is not given" in problem and "12" in problem and "5" in problem


def test_layers_and_stages() -> None:
    flags = f"{BASE} --global-batch-size 8 --edit-num-replicas 1 --num-layers"
    (problem,) = problems_of(f"{flags} 5 --pipeline-model-parallel-size 2")
    assert "--num-layers 5" in problem and "--pipeline-model-parallel-size 2" in problem and "4 or 6" in problem
    assert problems_of(f"{flags} 6 --pipeline-model-parallel-size 2") == []
    (problem,) = problems_of(f"{flags} 30 --pipeline-model-parallel-size 4")
    assert "28 or 32" in problem and "3 or 5" in problem


def test_uneven_stages_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(f"{BASE} --num-layers 4 --decoder-last-pipeline-num-layers 1".split())
    assert "--decoder-last-pipeline-num-layers 1 is refused" in error.value.problems[0]


def test_interleaved_pipeline() -> None:
    flags = f"{BASE} --edit-num-replicas 1 --num-layers 8 --num-layers-per-virtual-pipeline-stage"
    pp2 = "--pipeline-model-parallel-size 2"
    assert problems_of(f"{flags} 2 {pp2} --global-batch-size 4") == []
    (problem,) = problems_of(f"{flags} 3 {pp2} --global-batch-size 4")
    assert "3" in problem and "4 layers" in problem and "1, 2" in problem
    (problem,) = problems_of(f"{flags} 2 --global-batch-size 4")
    assert "needs a pipeline" in problem
    (problem,) = problems_of(f"{flags} 2 {pp2} --global-batch-size 6")
    assert "makes 3" in problem and "4 or 8" in problem
    (problem,) = problems_of(f"{flags} 4 {pp2} --global-batch-size 4")  # one chunk: not interleaved
    assert "two or more equal chunks" in problem


def test_key_value_heads_and_tensor_parallel() -> None:
    flags = f"{BASE} --global-batch-size 8 --edit-num-replicas 1 --num-query-groups"
    assert problems_of(f"{flags} 2 --tensor-model-parallel-size 4") == []  # two ranks share a group
    assert problems_of(f"{flags} 1 --tensor-model-parallel-size 4") == []
    assert problems_of(f"{flags} 1 --tensor-model-parallel-size 2") == []
    (problem,) = problems_of(f"{flags} 3 --num-attention-heads 6 --hidden-size 60 --tensor-model-parallel-size 2")
    assert "(neither number divides the other); these tensor parallel sizes would work: 1, 3, 6" in problem
    assert problems_of(f"{flags} 2 --tensor-model-parallel-size 2") == []


def test_tensor_parallel_sizes_that_are_offered_work() -> None:
    """SmolLM2-135M: 9 query heads, 3 groups of 64, an MLP of 1536. Then many shapes: what is offered has no problem,
    what is not has one, and a reason that is given is true."""
    smol = "--num-attention-heads 9 --num-query-groups 3 --hidden-size 576 --ffn-hidden-size 1536 --mock-data"
    (problem,) = problems_of(f"{smol} --tensor-model-parallel-size 2 --train-iters 9 --global-batch-size 8", 2)
    assert problem == (
        "--num-attention-heads 9 is not divisible by --tensor-model-parallel-size 2; these tensor parallel sizes would "
        "work: 1, 3"  # 9 would share heads, and does not divide the MLP
    )
    for heads, groups, channels, ffn in [(9, 3, 64, 1536), (12, 2, 4, 36), (12, 4, 2, 24), (8, 8, 6, 7), (6, 2, 2, 12)]:
        shape = f"--num-attention-heads {heads} --num-query-groups {groups} --kv-channels {channels} --mock-data"
        flags = f"{shape} --ffn-hidden-size {ffn} --train-iters 9 --replica-batch-size 1 --edit-num-replicas 1"

        def problems(tp: int, flags: str = flags) -> list[str]:
            return problems_of(f"{flags} --tensor-model-parallel-size {tp}", tp)

        works = [tp for tp in range(1, heads + 1) if not problems(tp)]
        for tp in set(range(1, heads + 1)) - set(works):
            text = "\n".join(problems(tp))
            assert f"these tensor parallel sizes would work: {', '.join(map(str, works))}" in text
            if "neither number divides the other" in text:
                assert groups % tp and tp % groups
            if f"--ffn-hidden-size {ffn} is not divisible" in text:
                assert ffn % tp and "would work too" in text


@pytest.mark.parametrize("fixed", ["--model-size llama2-7b", "--load /", "--ffn-hidden-size 11008 --num-layers 32"])
def test_no_other_size_is_offered_where_the_model_is_given(fixed: str) -> None:
    """Of a named model or of weights that are loaded; of flags alone one is."""
    shape = f"{fixed} --num-attention-heads 35 --kv-channels 2 --num-query-groups 35 --max-position-embeddings 5000"
    run = f"{shape} --mock-data --train-iters 9 --replica-batch-size 1 --edit-num-replicas 1"
    ffn = "" if "ffn" in fixed else " --ffn-hidden-size 11008"
    (problem,) = problems_of(f"{run}{ffn} --tensor-model-parallel-size 5", 5)
    assert "--ffn-hidden-size 11008 is not divisible by --tensor-model-parallel-size 5" in problem
    assert "these tensor parallel sizes would work: 1" in problem
    assert ("11005 or 11010" in problem) is ("--num-layers" in fixed)
    layers = "" if "layers" in fixed else " --num-layers 32"
    (problem,) = problems_of(f"{run}{layers} --pipeline-model-parallel-size 5", 5)
    assert "a pipeline size of 4 or 8" in problem and ("30 or 35 layers" in problem) is ("--num-layers" in fixed)


def test_ranks_that_cannot_share_a_group() -> None:
    flags = "--num-attention-heads 12 --num-query-groups 2 --kv-channels 4 --ffn-hidden-size 36 --mock-data"
    (problem,) = problems_of(f"{flags} --train-iters 9 --global-batch-size 1 --tensor-model-parallel-size 12", 12)
    assert "6 ranks would share the 8 rows of keys and values of a group" in problem and "neither" not in problem


FINE = f"{BASE} --global-batch-size 8 --edit-num-replicas 2"
# flags beside FINE | what the message names | what it offers
PROBLEMS = """
--num-attention-heads 6 --hidden-size 64 | --hidden-size 64 | 60 or 66
--num-attention-heads 6 --hidden-size 60 --num-query-groups 4 | --num-query-groups 4 | 3 or 6
--num-attention-heads 1 --num-query-groups 1 --tensor-model-parallel-size 2 | heads 1 | work: 1
--ffn-hidden-size 129 --tensor-model-parallel-size 2 | --ffn-hidden-size 129 | 128 or 130
--num-attention-heads 4 --hidden-size 20 | --kv-channels 5 | odd
--sequence-parallel --tensor-model-parallel-size 2 --seq-length 33 | --seq-length | 32 or 34
--seq-length 64 --max-position-embeddings 32 | --seq-length 64 | --max-position-embeddings 32
--rope-scaling-type llama3 --rope-scaling-low-freq-factor 4 | --rope-scaling-low-freq-factor 4 | 1 and 4
--context-parallel-size 2 | --context-parallel-size 2 | on the CPU only 1
--fp16 | --fp16 | needs a GPU
--device cuda | --device cuda | --device cpu would work
--transformer-impl transformer_engine | transformer_engine | --transformer-impl local works
--replica-batch-size 4 | --global-batch-size 8 | --replica-batch-size 4
--train-samples 80 | --train-iters 100 | --train-samples 80
--recompute-granularity full | --recompute-granularity full | uniform and 1
--recompute-method uniform | --recompute-method uniform | --recompute-granularity full
--recompute-granularity selective --recompute-num-layers 1 | --recompute-num-layers 1 | not selective
--recompute-granularity full --recompute-method uniform --recompute-num-layers 3 | layers 3 | 1, 2, 4
--recompute-granularity full --recompute-method block --recompute-num-layers 5 | layers 5 | 1, 2, 3, 4
--data-path a | --mock-data | --data-path
--tokenizer-type SentencePieceTokenizer | SentencePieceTokenizer | --tokenizer-model
--tokenizer-type Llama2Tokenizer --tokenizer-model /nowhere/a.model | /nowhere/a.model | does not exist
--tokenizer-type NullTokenizer | NullTokenizer | --vocab-size
--save-interval 5 | --save-interval 5 | --save DIR
--load /nowhere/at/all | --load /nowhere/at/all | equals --save
--min-lr 1 --lr 0.1 | --min-lr 1 | --lr 0.1
--lr-warmup-init 1 --lr 0.1 | --lr-warmup-init 1 | --lr 0.1
"""


@pytest.mark.parametrize("row", PROBLEMS.strip().splitlines())
def test_each_problem_alone(row: str) -> None:
    flags, names, offers = row.split(" | ")
    assert problems_of(FINE) == []
    (problem,) = problems_of(f"{FINE} {flags}")
    assert names in problem and offers in problem, problem


def test_bf16_and_fp16_together() -> None:
    (problem,) = problems_of(f"{FINE} --bf16 --fp16 --device cuda", device="cuda")
    assert "--bf16 and --fp16" in problem


def test_context_parallel_on_a_gpu() -> None:
    flags = f"{FINE} --context-parallel-size 2"
    te = "--transformer-impl transformer_engine"
    assert problems_of(f"{flags} {te}", device="cuda") == []
    (problem,) = problems_of(flags, device="cuda")
    assert te in problem
    (problem,) = problems_of(f"{flags} {te} --seq-length 126", device="cuda")
    assert "124 or 128" in problem
    (problem,) = problems_of(f"{flags} {te} --edit-num-replicas 4", device="cuda")
    assert "would span replicas" in problem and "1, 2" in problem


def test_missing_basics_are_all_named_at_once() -> None:
    found = "\n".join(problems_of(""))
    for needed in ("--global-batch-size", "--train-iters", "--data-path", "--tokenizer-type"):
        assert needed in found


def test_corpora() -> None:
    basics = "--train-iters 100 --global-batch-size 8 --tokenizer-type ByteTokenizer"
    assert problems_of(f"{basics} --data-path a b") == []
    assert problems_of(f"{basics} --train-data-path a --valid-data-path b") == []
    (problem,) = problems_of(f"{basics} --data-path a --train-data-path b")
    assert "--data-path" in problem and "--train-data-path" in problem
    (problem,) = problems_of(f"{basics} --valid-data-path b")
    assert "no training data" in problem


def test_evaluation_needs_validation_data() -> None:
    basics = "--train-iters 100 --global-batch-size 8 --tokenizer-type ByteTokenizer --eval-interval 10"
    assert problems_of(f"{basics} --data-path a") == []
    (problem,) = problems_of(f"{basics} --data-path a --split 100,0,0")
    assert "--eval-interval 10" in problem and "--split 100,0,0" in problem
    (problem,) = problems_of(f"{basics} --train-data-path a")
    assert "--valid-data-path" in problem
    (note,) = [
        n for n in notes(resolved(f"{basics} --data-path a --eval-iters 0 --edit-sync-interval 0")) if "eval" in n
    ]
    assert "nothing is evaluated" in note


def test_load_may_be_missing_only_when_it_equals_save(tmp_path: Path) -> None:
    missing = tmp_path / "new"
    assert problems_of(f"{FINE} --save {missing} --load {missing}") == []
    assert problems_of(f"{FINE} --save {missing} --load {tmp_path}/./new") == []
    assert problems_of(f"{FINE} --load {tmp_path}") == []
    assert len(problems_of(f"{FINE} --save {tmp_path} --load {missing}")) == 1
    assert not missing.exists()


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for flag in ("--save", "--tensorboard-dir"):
        (problem,) = problems_of(f"{FINE} {flag} {file}/below")
        assert flag in problem and "is a file" in problem
    (problem,) = problems_of(f"{FINE} --log-sample-ids {file}/ids.txt")
    assert "--log-sample-ids" in problem
    (problem,) = problems_of(f"{FINE} --metrics-file {tmp_path}")
    assert "is a folder" in problem
    assert problems_of(f"{FINE} --log-sample-ids {tmp_path}/a/ids.txt") == []
    assert sorted(tmp_path.iterdir()) == [file], "a check must leave nothing behind"


def test_config_made_in_python_is_checked_too() -> None:
    config = Config(
        training=TrainingConfig(micro_batch_size=0, global_batch_size=8, train_iters=10, seed="x"),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        data=DataConfig(mock_data=True, num_workers=-1),
    )
    assert check(config, 4, 4, "cpu") == [
        "--micro-batch-size must be at least 1, not 0",
        "--seed must be an integer, not 'x'",
        "--num-workers must be at least 0, not -1",
    ]


def test_notes_that_a_user_should_see() -> None:
    def found(flags: str) -> str:
        return "\n".join(notes(resolved(f"{BASE} --global-batch-size 8 {flags}")))

    assert "ONE replica" in found("")
    assert "ONE replica" not in found("--edit-num-replicas 2")
    assert "ONE replica" not in found("--edit-method baseline")
    assert "no sync would happen" in found("--edit-num-replicas 2 --edit-sync-interval 101")
    assert "no sync would happen" in found("--edit-num-replicas 2 --edit-sync-interval 91 --edit-warmup-steps 10")
    assert "no sync would happen" not in found("--edit-num-replicas 2 --edit-sync-interval 90 --edit-warmup-steps 10")
    assert "whole run is synchronous" in found("--edit-num-replicas 2 --edit-warmup-steps 100")
    assert "after the synchronous warm-up" in found("--edit-num-replicas 2 --lr-warmup-iters 10 --edit-warmup-steps 9")
    assert "rate still rises" not in found("--edit-num-replicas 2 --lr-warmup-iters 10 --edit-warmup-steps 10")
    assert "--sequence-parallel is turned off" in found("--sequence-parallel")
    assert "--edit-outer-lr" in found("--edit-method baseline --edit-outer-lr 1")
    assert "--edit-sync-interval" in found("--edit-method baseline")
    assert "--edit-sync-interval" not in found("--edit-sync-interval 0")
    assert "small ones are lost" in found("--bf16 --no-accumulate-allreduce-grads-in-fp32")
    assert "--use-mcore-models --swiglu" in found("--use-mcore-models --swiglu")
    plain = found("--edit-num-replicas 2 --edit-sync-interval 10")
    assert plain == ""


def test_note_on_waiting_longer_than_the_time_out() -> None:
    a_edit = "--mock-data --edit-method a-edit --train-samples 800 --global-batch-size 8 --edit-num-replicas 2"
    (note,) = notes(resolved(a_edit))
    assert "--distributed-timeout-seconds 600 is not above --edit-sync-time 600" in note and "1200 would" in note
    assert notes(resolved(f"{a_edit} --edit-sync-time 599")) == []


def test_interval_zero_is_the_baseline() -> None:
    config = resolved(f"{FINE} --edit-sync-interval 0")
    assert config.edit.edit_method == "baseline"
    assert config.sources["edit_method"] == "derived"


def test_describe_shows_the_mesh_and_the_syncs() -> None:
    flags = f"{BASE} --model-size llama3-8b --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    config = resolved(f"{flags} --global-batch-size 32 --edit-num-replicas 2 --edit-warmup-steps 15", 16)
    text = describe(config, vocab_size=128256)
    assert "16 ranks = sync 2 x dp 2 x pp 2 x cp 1 x tp 2" in text
    assert "ranks 0-7, 8-15" in text
    assert "32 = 2 stages x 16" in text
    assert f"{100 * 32} samples, {100 * 32 * 8192} tokens" in text
    assert "9 syncs planned, the last one at the end" in text  # iterations 25, 35, ..., 95, and 100
    assert "8,030,261,248" in text


def test_configure_reports_flags_and_relations_at_once() -> None:
    environment = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    flags = f"{BASE} --micro-batch-sise 2 --tensor-model-parallel-size 2 --lr abc --global-batch-size 9".split()
    with pytest.raises(ConfigError) as error:
        configure(flags, environment, "cpu")
    text = str(error.value)
    assert "did you mean --micro-batch-size" in text and "--lr must be a number" in text and "3 ranks" in text
    assert len(error.value.problems) == 3


def test_configure_does_not_repeat_what_a_bad_value_hides() -> None:
    with pytest.raises(ConfigError) as error:
        configure(["--mock-data", "--train-iters", "ten", "--glboal-batch-size", "8"], {}, "cpu")
    assert len(error.value.problems) == 2, error.value.problems


@pytest.mark.parametrize("text", ["trainng:\n  train_iters: 3\n  global_batch_size: 8\n", "a: [", None])
def test_configure_of_a_file_that_cannot_be_understood(tmp_path: Path, text: str | None) -> None:
    """One problem: of the section, the YAML or the file, and not also that the settings in it are missing."""
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        configure(["--mock-data", "--config", str(path)], {}, "cpu")
    (problem,) = error.value.problems
    assert "run.yaml" in problem


def test_configure_refuses_a_bad_environment() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a number"):
        configure(f"{BASE} --global-batch-size 8".split(), {"WORLD_SIZE": "many"}, "cpu")


def test_world_size_one_with_two_replicas() -> None:
    with pytest.raises(ConfigError) as error:
        configure(f"{BASE} --global-batch-size 8 --edit-num-replicas 2".split(), {}, "cpu")
    (problem,) = error.value.problems
    assert "--edit-num-replicas 2" in problem and "1 ranks" in problem and "start 2 ranks" in problem


# ---- the synchronisation method --------------------------------------------------------------------------------------

METHOD = "--mock-data --global-batch-size 8 --edit-num-replicas 2"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--train-iters 8 --edit-method a-edit", ["--train-iters 8", "--train-samples, for example 64"]),
        ("--train-samples 64 --edit-method a-edit --edit-sync-interval 128", ["--edit-sync-interval 128", "600"]),
        ("--edit-method a-edit", ["--train-samples"]),
        ("--edit-sync-time 5", ["--edit-sync-time 5", "--edit-method edit"]),
        ("--edit-min-total-steps 5", ["--edit-min-total-steps 5"]),
        ("--train-samples 64 --edit-method a-edit --edit-step-weight-ratio 2", ["--edit-step-weight-ratio 2", "0.5"]),
        ("--edit-method diloco --edit-sync-interval 0", ["--edit-sync-interval 0", "128"]),
        ("--edit-sync-delay 2", ["--edit-sync-delay 2", "streaming"]),
        ("--edit-method streaming --edit-sync-interval 4 --edit-sync-delay 5", ["delay 5", "0 to 4"]),
        ("--edit-method streaming --edit-mixing-alpha 0.5", ["--edit-mixing-alpha 0.5", "delay"]),
        ("--edit-method streaming --edit-num-fragments 7", ["--edit-num-fragments 7", "1 to 6"]),
        ("--edit-method slowmo --edit-weighting softmax", ["--edit-weighting softmax", "edit, a-edit"]),
        ("--edit-method post-local-sgd --edit-outer-lr 1", ["--edit-outer-lr 1", "no anchor"]),
        ("--edit-method post-local-sgd --edit-cpu-offload", ["--edit-cpu-offload", "no anchor"]),
        ("--edit-method co2-sharded --edit-cpu-offload", ["--edit-cpu-offload", "dealt out"]),
        ("--edit-method co2 --edit-sync-placement step", ["--edit-sync-placement step", "round"]),
        ("--edit-co2-gap-penalty 2", ["--edit-co2-gap-penalty 2", "co2"]),
        ("--edit-method co2 --edit-inner-moments average", ["--edit-inner-moments", "--edit-method co2"]),
        ("--edit-inner-moments-interval 2", ["--edit-inner-moments-interval 2", "average"]),
        ("--edit-consensus sum --edit-comm-dtype int8", ["--edit-consensus sum", "--edit-comm-dtype int8"]),
        ("--edit-sparsity-method random", ["--edit-sparsity-method random", "0.5"]),
        ("--edit-method streaming --save-scope compact", ["--save-scope compact", "full"]),
        ("--edit-cpu-offload --num-layers 96 --hidden-size 12288 --num-attention-heads 96",
         ["--edit-cpu-offload", "GB", "2 ranks"]),
    ],
)  # fmt: skip
def test_contradictions_of_a_method_are_one_clear_message(flags: str, named: list[str]) -> None:
    length = "" if "a-edit" in flags or "--train" in flags else "--train-iters 8"
    problems = problems_of(f"{METHOD} {length} {flags}", world_size=2)
    assert len(problems) == 1, problems
    for words in named:
        assert words in problems[0], problems


@pytest.mark.parametrize("flags", ["--edit-method nosync", "--edit-comm-dtype int2", "--edit-sync-delay -1"])
def test_unknown_values_of_a_method_name_the_flag(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(f"{METHOD} --train-iters 8 {flags}".split(), {"WORLD_SIZE": "2"}, "cpu")
    assert flags.split()[0] in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves_and_its_printed_config_reads_back(method: str, tmp_path: Path) -> None:
    length = "--train-samples 64" if method == "a-edit" else "--train-iters 8"
    config = resolved(f"{METHOD} {length} --edit-method {method}", world_size=2)
    if method != "baseline":
        assert config.edit.edit_weighting == METHODS[method].weighting
        assert config.edit.edit_outer_lr == METHODS[method].outer_lr
    file = tmp_path / "printed.yaml"
    file.write_text(print_config(config))
    again = configure(["--config", str(file)], {"WORLD_SIZE": "2"}, "cpu")
    assert again is not None and again.edit == config.edit
