"""Flags and YAML to Config: precedence, sources, suggestions, refusals; help and --print-config from the
schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_edit.config.derive import resolve
from megatron_edit.config.flags import ALL_FLAGS, load_config
from megatron_edit.config.megatron_flags import MEGATRON_FLAGS
from megatron_edit.config.notes import notes
from megatron_edit.config.printing import help_text, print_config
from megatron_edit.config.schema import SECTIONS, Config, ConfigError
from megatron_edit.config.settings import SETTINGS, is_given, value_of, value_problem


def load(flags: str) -> Config:
    return load_config(flags.split())


def problems_of(flags: str) -> list[str]:
    try:
        load_config(flags.split())
    except ConfigError as error:
        return error.problems
    return []


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return str(file)


# ---- the schema


def test_every_setting_has_help_and_a_default_that_is_allowed() -> None:
    for setting in SETTINGS.values():
        assert len(setting.help) > 4, setting.name
        assert setting.default is None or value_problem(setting, setting.default) is None, setting.name
        assert setting.kind in (int, float, str, bool, list), setting.name


def test_names_are_unique_over_all_sections_and_tables() -> None:
    assert len(SETTINGS) == sum(len(cls.__dataclass_fields__) for cls in SECTIONS.values())
    assert len(set(ALL_FLAGS)) == len(ALL_FLAGS)
    assert not set(SETTINGS) & set(SECTIONS), "a section and a setting share a YAML key"


def test_config_imports_no_torch() -> None:
    code = "import megatron_edit.config, sys; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_holds_every_flag_under_its_section() -> None:
    text = help_text()
    for section in SECTIONS:
        assert f"\n{section}: " in text
    for setting in SETTINGS.values():
        assert f"\n  {setting.flag}" in text
    assert "--edit-sync-interval N\n" in text and "(default: 128)" in text
    config = load_config(["--no-such-flag", "--help"])
    assert config.command.help


# ---- flags


def test_defaults_and_their_sources() -> None:
    config = load_config([])
    for name, setting in SETTINGS.items():
        assert value_of(config, name) == setting.default == value_of(Config(), name)
        assert config.sources[name] == "default"
        assert not is_given(config, name)


@pytest.mark.parametrize("flags", ["--lr 1e-3 --seed 7", "--lr=1e-3 --seed=7", "--lr 9 --seed=3 --seed=7 --lr 1e-3"])
def test_value_with_space_or_equals_and_the_last_one_holds(flags: str) -> None:
    config = load_config(flags.split())
    assert (config.optimizer.lr, config.training.seed) == (1e-3, 7)
    assert config.sources["lr"] == config.sources["seed"] == "flag"


def test_switches() -> None:
    config = load("--bf16 --no-exit-signal-handler")
    assert config.training.bf16 and not config.training.exit_signal_handler
    assert not load("--bf16 --no-bf16").training.bf16
    assert "is a switch" in problems_of("--bf16 true")[0]
    assert "is a switch" in problems_of("--bf16=true")[0]


def test_lists() -> None:
    assert load("--data-path 0.3 a 0.7 b --bf16").data.data_path == ["0.3", "a", "0.7", "b"]
    assert load("--data-path=a").data.data_path == ["a"]
    assert "needs a value" in problems_of("--data-path --bf16")[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--micro-batchsize 2", "did you mean --micro-batch-size?"),
        ("--edit-sync-intervall 2", "did you mean --edit-sync-interval?"),
        ("--tensor-model-parallel 2", "did you mean --tensor-model-parallel-size?"),
        ("--micro_batch_size 2", "did you mean --micro-batch-size?"),
        ("--micro-batch 2", "is not a flag"),  # no abbreviations
        ("--xyzzy 2", "--xyzzy is not a flag of this program"),
        ("stray --bf16", "'stray' stands before any flag"),
        ("--seed 1 2", "takes one value"),
        ("--seed", "needs a value"),
        ("--seed 1.5", "--seed must be an integer, not '1.5'"),
        ("--seed -1", "--seed must be at least 0, not -1"),
        ("--train-iters -5", "--train-iters must be at least 0, not -5"),
        ("--eval-interval -1", "--eval-interval must be at least 1, not -1"),
        ("--save-interval 0", "--save-interval must be at least 1, not 0"),
        ("--rope-scaling-factor 0.5", "--rope-scaling-factor must be at least 1, not 0.5"),
        ("--rope-scaling-factor nan", "--rope-scaling-factor must be a finite number, not nan"),
        ("--edit-sync-interval -1", "--edit-sync-interval must be at least 0, not -1"),
        ("--lr nan", "--lr must be a finite number, not nan"),
        ("--lr inf", "--lr must be a finite number, not inf"),
        ("--clip-grad -0.5", "--clip-grad must be at least 0, not -0.5"),
        ("--adam-beta1 1", "--adam-beta1 must be below 1, not 1.0"),
        ("--adam-beta2 -0.1", "--adam-beta2 must be at least 0"),
        ("--edit-softmax-temperature 0", "--edit-softmax-temperature must be above 0"),
        ("--edit-anomaly-warmup-syncs 2", "--edit-anomaly-warmup-syncs must be at least 3"),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction must be below 1"),
        ("--hidden-dropout 1", "--hidden-dropout must be below 1"),
        ("--device tpu", "--device must be one of auto, cpu, cuda, not 'tpu'"),
        ("--model-size 13b", "--model-size must be one of tiny"),
    ],
)
def test_refusals(flags: str, expected: str) -> None:
    (problem,) = problems_of(flags)
    assert expected in problem


def test_all_problems_at_once() -> None:
    assert len(problems_of("--lr nan --xyzzy --seed x --num-experts 8 --bf16 on")) == 5


# ---- presets and YAML


def test_precedence_flag_yaml_preset_default(tmp_path: Path) -> None:
    path = write(tmp_path, "model_size: llama2-7b\nhidden_size: 256\nnum_layers: 8\nlr: 3e-5\n")
    config = load_config(["--config", path, "--num-layers", "2"])
    assert (config.model.num_layers, config.sources["num_layers"]) == (2, "flag")
    assert (config.model.hidden_size, config.sources["hidden_size"]) == (256, path)
    assert (config.model.ffn_hidden_size, config.sources["ffn_hidden_size"]) == (11008, "preset llama2-7b")
    assert (config.optimizer.min_lr, config.sources["min_lr"]) == (0.0, "default")
    assert (config.optimizer.lr, config.sources["lr"]) == (3e-5, path)  # YAML 1.1 reads 3e-5 as text
    assert config.sources.keys() == SETTINGS.keys()
    smaller = load_config(["--config", path, "--model-size", "tiny"])
    assert (smaller.model.num_query_groups, smaller.sources["num_query_groups"]) == (4, "preset tiny")
    tied = load("--model-size 7b --no-untie-embeddings-and-output-weights")
    assert not tied.model.untie_embeddings_and_output_weights


def test_yaml_flat_grouped_and_mixed(tmp_path: Path) -> None:
    flat = load_config(["--config", write(tmp_path, "lr: 1\nbf16: true\ndata_path: [0.5, a, 0.5, b]\nsave: out\n")])
    assert (flat.optimizer.lr, flat.training.bf16, flat.checkpoint.save) == (1.0, True, "out")
    assert isinstance(flat.optimizer.lr, float) and flat.data.data_path == ["0.5", "a", "0.5", "b"]
    text = "optimizer:\n  lr: 1\ntraining: {bf16: true}\ndata_path: a\nmodel:\nload: null\n"
    grouped = load_config(["--config", write(tmp_path, text)])
    assert (grouped.optimizer.lr, grouped.training.bf16, grouped.data.data_path) == (1.0, True, ["a"])
    assert grouped.sources["load"] == "default"
    assert not load_config(["--config", write(tmp_path, "bf16: true"), "--no-bf16"]).training.bf16
    assert load_config(["--config", write(tmp_path, "")]) == load_config(["--config", write(tmp_path, "# nothing\n")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("micro_batchsize: 2", "key micro_batchsize is not a setting; did you mean micro_batch_size?"),
        ("micro-batch-size: 2", "did you mean micro_batch_size?"),
        ("modle: {num_layers: 2}", "did you mean model?"),
        (
            "micro_batch_size: four",
            "key micro_batch_size (--micro-batch-size) must be an integer, not 'four'",
        ),
        ("micro_batch_size: '4'", "must be an integer, not '4'"),
        ("micro_batch_size: 4.0", "must be an integer, not 4.0"),
        ("micro_batch_size: true", "must be an integer, not True"),
        ("lr: fast", "key lr (--lr) must be a number, not 'fast'"),
        ("lr: true", "must be a number, not True"),
        ("lr: .nan", "must be a finite number"),
        ("bf16: 1", "key bf16 (--bf16) must be true or false, not 1"),
        ("split: 100", "key split (--split) must be text, not 100"),
        ("data_path: {a: 1}", "must be a list of text"),
        ("model:\n  lr: 1", "key lr stands under model, but belongs to optimizer"),
        ("model: 3", "section model must hold `key: value` lines, not 3"),
        ("lr: 1\nlr: 2", "key lr stands twice"),
        ("lr: 1\noptimizer:\n  lr: 2", "key lr stands twice"),
        ("dry_run: true", "key dry_run can only be given as the flag --dry-run"),
        ("- lr", "must hold `key: value` lines, not list"),
        ("lr: [", "is not valid YAML"),
        ("save: 2024-13-45", "is not valid YAML: month must be in 1..12"),
        ("lr: !!float fast", "is not valid YAML"),
        (f"lr: {10**400}", "must be below 2^63, not a number of 1329 bits"),
        (f"seed: {10**400}", "must be below 2^63, not a number of 1329 bits"),
        ("edit_weighting: max", "must be one of softmax, mean, not 'max'"),
        ("use_mcore_models: true", "key use_mcore_models is not a setting"),
    ],
)
def test_yaml_refusals(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = problems_of(f"--config {write(tmp_path, text)}")
    assert expected in problem and "run.yaml" in problem


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in problems_of("--config /nowhere/run.yaml")[0]
    assert "cannot be read" in problems_of(f"--config {tmp_path}")[0]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems_of(f"--config {binary}")[0]


def test_print_config_reads_back_to_the_same_settings(tmp_path: Path) -> None:
    argv = "--model-size tiny --mock-data --train-iters 9 --global-batch-size 8 --lr 3e-5 --data-path 1e-3 no"
    config = load_config(argv.split())
    text = print_config(resolve(config, 4, 2, "cpu"))
    assert "  lr: 3.0e-05  # flag" in text and "  num_layers: 4  # preset tiny" in text
    assert "  # ffn_hidden_size" not in text and "  # kv_channels: 16  # derived" in text
    again = load_config(["--config", write(tmp_path, text)])
    for name in SETTINGS:
        if name != "config":
            assert value_of(again, name) == value_of(config, name), name
    assert resolve(again, 8, 2, "cpu").edit.edit_num_replicas == 4, "derived values must not be frozen"


# ---- Megatron-LM's flags


def test_flags_without_effect_are_one_note() -> None:
    flags = (
        "--use-mcore-models --swiglu --normalization RMSNorm --distributed-backend nccl "
        "--optimizer adam --position-embedding-type rope --ckpt-format torch_dist"
    )
    config = load_config(flags.split())
    (note,) = [note for note in notes(config) if "Megatron" in note]
    for flag in ("--use-mcore-models", "--swiglu", "--normalization RMSNorm", "--distributed-backend nccl"):
        assert flag in note


CHANGES_THE_RESULT = """
--decrease-batch-size-if-needed
--num-experts 8
--moe-router-topk 2
--fp8-format hybrid
--add-bias-linear
--decoder-first-pipeline-num-layers 3
--use-megatron-fsdp
--multi-latent-attention
--optimizer sgd
--expert-model-parallel-size 2
--squared-relu
--normalization LayerNorm
--position-embedding-type learned_absolute
--ckpt-format torch
--no-save-optim
"""


@pytest.mark.parametrize("flags", CHANGES_THE_RESULT.strip().splitlines())
def test_flags_that_would_change_the_result_are_refused_by_name(flags: str) -> None:
    (problem,) = problems_of(flags)
    assert problem.startswith(f"{flags} is refused: ")


def test_every_refused_flag_says_why() -> None:
    for flag, entry in MEGATRON_FLAGS.items():
        if flag == "--group-query-attention":
            continue  # has a test of its own
        if entry.allowed is None:
            assert problems_of(f"{flag} 1" if entry.takes_value else flag) == []
        else:
            assert len(entry.reason) > 8
            assert all(problems_of(f"{flag} {value}") == [] for value in entry.allowed), flag
            assert entry.reason in problems_of(f"{flag} something-else")[0]


def test_accepted_flags_keep_their_shape() -> None:
    assert "takes no value" in problems_of("--swiglu 3")[0]
    assert "needs a value" in problems_of("--distributed-backend")[0]
    assert problems_of("--rotary-percent 1") == []


def test_translated_flags() -> None:
    config = load("--use-rope-scaling --recompute-activations --distributed-timeout-minutes 3")
    assert config.model.rope_scaling_type == "llama3"
    assert config.parallel.recompute_granularity == "selective"
    assert config.parallel.distributed_timeout_seconds == 180
    linear = load("--rotary-seq-len-interpolation-factor 4").model
    assert (linear.rope_scaling_type, linear.rope_scaling_factor) == ("linear", 4.0)
    assert "must be a number" in problems_of("--distributed-timeout-minutes x")[0]
    assert "at least 1" in problems_of("--distributed-timeout-minutes 0")[0]


def test_grouped_query_attention_needs_its_number() -> None:
    assert "needs --num-query-groups" in problems_of("--group-query-attention")[0]
    assert problems_of("--group-query-attention --num-query-groups 2") == []
