"""Flags and YAML to Config: precedence, sources, suggestions, refusals; help and --print-config from the
schema."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_edit.config.configure import resolve
from megatron_edit.config.derive import derive
from megatron_edit.config.flags import ALL_FLAGS, load_config
from megatron_edit.config.megatron_flags import MEGATRON_FLAGS, TRANSLATED, entry_of
from megatron_edit.config.notes import notes
from megatron_edit.config.paths import PathParser
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
        ("micro_batch_size: 4.0", "must be an integer, not '4.0'"),
        ("micro_batch_size: true", "must be an integer, not 'true'"),
        ("lr: fast", "key lr (--lr) must be a number, not 'fast'"),
        ("lr: true", "must be a number, not 'true'"),
        ("lr: .nan", "must be a finite number"),
        ("bf16: 1", "key bf16 (--bf16) must be true or false, not '1'"),
        ("split: [1, 2]", "key split (--split) must be text, not ['1', '2']"),
        ("data_path: {a: 1}", "must be a list of text"),
        ("model:\n  lr: 1", "key lr stands under model, but belongs to optimizer"),
        ("model: 3", "section model must hold `key: value` lines, not '3'"),
        ("lr: 1\nlr: 2", "key lr stands twice"),
        ("lr: 1\noptimizer:\n  lr: 2", "key lr stands twice"),
        ("dry_run: true", "key dry_run can only be given as the flag --dry-run"),
        ("- lr", "must hold `key: value` lines, not list"),
        ("lr: [", "is not valid YAML"),
        ("seed: 0123", "must be an integer, not '0123' (YAML 1.1 reads 83): write 83 or 123"),
        ("seed: 08", "must be an integer, not '08': write 8"),
        ("train_iters: 1:30", "must be an integer, not '1:30' (YAML 1.1 reads 90): write 90"),
        ("train_iters: 1_000", "must be an integer, not '1_000' (YAML 1.1 reads 1000): write 1000"),
        ("seed: 0x1F", "must be an integer, not '0x1F' (YAML 1.1 reads 31): write 31"),
        ("train_iters: 8.0", "must be an integer, not '8.0' (YAML 1.1 reads 8): write 8"),
        ("seed: yes", "must be an integer, not 'yes'"),
        ("seed: 2024-01-31", "must be an integer, not '2024-01-31'"),
        ("lr: 010", "must be a number, not '010' (YAML 1.1 reads 8): write 8 or 10"),
        ("lr: 1:30.5", "must be a number, not '1:30.5' (YAML 1.1 reads 90.5): write 90.5"),
        ("lr: .inf", "must be a finite number, not inf"),
        ("bf16: y", "must be true or false, not 'y'"),
        ("save: !!timestamp 2024-13-45", "is not valid YAML: month must be in 1..12"),
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


@pytest.mark.parametrize("text", ["seed: .inf", "seed: .nan", "train_iters: 8.5", "train_iters: 1e400"])
def test_yaml_refusals_advise_no_number_that_would_be_refused(tmp_path: Path, text: str) -> None:
    (problem,) = problems_of(f"--config {write(tmp_path, text)}")
    assert problem.endswith(f"must be an integer, not '{text.split()[1]}'")


def test_yaml_text_is_the_text_that_is_written(tmp_path: Path) -> None:
    """Nothing is lost to YAML 1.1's numbers, dates and words; switches take its words."""
    text = "data_path: [007, 1e-3, no, 1_0]\nsave: 2024-01-31\nsplit: 100\nwandb_project: on\nlog_sample_ids: 0x10\n"
    config = load_config(["--config", write(tmp_path, text + "bf16: Yes\nload_optim: OFF\nload_rng: true\nload: ~\n")])
    assert config.data.data_path == ["007", "1e-3", "no", "1_0"]
    assert (config.checkpoint.save, config.data.split, config.logging.wandb_project) == ("2024-01-31", "100", "on")
    assert config.data.log_sample_ids == "0x10" and config.checkpoint.load is None
    assert config.training.bf16 and not config.checkpoint.load_optim and config.checkpoint.load_rng
    text = "lr: +1.e-3\nmin_lr: .5e-4\nclip_grad: 0\nseed: +7\nadam_eps: 1E-8"
    numbers = load_config(["--config", write(tmp_path, text)])
    assert (numbers.optimizer.lr, numbers.optimizer.min_lr, numbers.optimizer.clip_grad) == (1e-3, 5e-5, 0.0)
    assert (numbers.training.seed, numbers.optimizer.adam_eps) == (7, 1e-8)


# ---- paths


def test_which_settings_are_paths() -> None:
    paths = {s.name for s in SETTINGS.values() if s.is_path}
    words = ("path", "dir", "file", "folder")
    assert {"save", "load", "config", "tensorboard_dir", "metrics_file", "tokenizer_model", "data_path"} <= paths
    assert not [s.name for s in SETTINGS.values() if s.name.endswith(words) and s.kind in (str, list) and not s.is_path]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/ck", "/home/me/ck"),
        ("~", "/home/me"),
        ("$SCRATCH/ck", "/scratch/ck"),
        ("${SCRATCH}x/$SCRATCH", "/scratchx//scratch"),
        ("./~/ck", "./~/ck"),
        ("a~/$", "a~/$"),
        ("cost$$/x", "cost$/x"),
        ("50$-x", "50$-x"),
    ],
)
def test_paths_expand_in_flags_and_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, meant: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    flags = load_config([f"--save={written}", "--data-path", "0.5", written, "0.5", "b", "--metrics-file", written])
    assert (flags.checkpoint.save, flags.logging.metrics_file) == (meant, meant)
    assert flags.data.data_path == ["0.5", meant, "0.5", "b"]
    text = f"train_data_path: ['{written}', b]\ntensorboard_dir: '{written}'\n"
    yaml = load_config(["--config", write(tmp_path, text)])
    assert yaml.logging.tensorboard_dir == meant
    assert yaml.data.train_data_path == [meant, "b"]
    again = load_config(["--config", write(tmp_path, print_config(derive(flags, 1, 1, "cpu")))])
    assert again.checkpoint.save == meant and again.data.data_path == flags.data.data_path


def test_paths_of_files_that_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", "/data")
    (tmp_path / "corpora.txt").write_text("0.5 $DATA/a 0.5 ~/b\n")
    config = load_config(["--data-args-path", "~/corpora.txt"])
    assert config.data.data_path == ["0.5", "/data/a", "0.5", f"{tmp_path}/b"]
    (tmp_path / "run.yaml").write_text("valid_data_path: [news=~/b, x/y=~/b]")
    assert load_config(["--config", "~/run.yaml"]).data.valid_data_path == [f"news={tmp_path}/b", "x/y=~/b"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("$NO_SUCH_VARIABLE/ck", "holds $NO_SUCH_VARIABLE, but the environment variable NO_SUCH_VARIABLE is not set"),
        ("${EMPTY}/ck", "holds $EMPTY, but the environment variable EMPTY is empty"),
        ("~no-such-user/ck", "begins with ~no-such-user, but there is no such user"),
    ],
)
def test_paths_that_cannot_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str) -> None:
    monkeypatch.setenv("EMPTY", "")
    (problem,) = problems_of(f"--save {path}")
    assert problem.startswith(f"--save {path} {expected}")
    (problem,) = problems_of(f"--data-path 0.5 a 0.5 {path}")
    assert problem.startswith(f"--data-path 0.5 a 0.5 {path} {expected}")
    (problem,) = problems_of(f"--config {write(tmp_path, f'load: {path}')}")
    assert f"run.yaml: key load (--load) {path} {expected}" in problem
    assert expected in problems_of(f"--config {path}")[0] and len(problems_of(f"--config {path}")) == 1
    assert expected in problems_of(f"--data-args-path {path}")[0]


def test_paths_of_the_tools(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parser = PathParser()
    group = parser.add_argument_group("files")
    group.add_argument("--input", nargs="+", metavar="PATH")
    group.add_argument("--load", type=Path, default=Path("x"))
    group.add_argument("--prompt", metavar="TEXT")
    found = parser.parse_args(["--input=~/a", "--prompt", "~/b costs $NOTHING"])
    assert (found.input, found.load, found.prompt) == (["/home/me/a"], Path("x"), "~/b costs $NOTHING")
    assert parser.parse_args(["--load=$HOME/c"]).load == Path("/home/me/c")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--load=$NO_SUCH_VARIABLE/c"])
    assert end.value.code == 2 and "--load $NO_SUCH_VARIABLE/c holds" in capsys.readouterr().err


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
    config = load_config(f"--mock-data --train-iters 9 --global-batch-size 8 {flags}".split())
    (note,) = [note for note in notes(resolve(config, 1, 1, "cpu")) if "Megatron" in note]
    for flag in ("--use-mcore-models", "--swiglu", "--normalization RMSNorm", "--distributed-backend nccl"):
        assert flag in note


CHANGES_THE_RESULT = """
--decrease-batch-size-if-needed
--num-experts 8
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


def test_every_refused_flag_says_why_and_what_happens_without_it() -> None:
    for flag, entry in MEGATRON_FLAGS.items():
        if flag == "--group-query-attention":
            continue  # has a test of its own
        if entry.allowed is None:
            assert problems_of(f"{flag} 1" if entry.takes_value else flag) == []
            continue
        assert len(entry.reason) > 8 and len(entry.instead) > 8
        assert all(problems_of(f"{flag} {value}") == [] for value in entry.allowed), flag
        if entry.beside:
            assert problems_of(f"{flag} something-else") == [], f"{flag}: without effect in Megatron-LM too"
        leader = entry.beside[0] if entry.beside else "--seed 3"
        leader += " sgd" if leader == "--optimizer" else "" if leader in ("--fp16", "--seed 3") else " 8"
        assert any(entry.reason in problem for problem in problems_of(f"{leader} {flag} something-else")), flag


def megatron_lm_flags() -> dict[str, dict[str, str]]:
    """release -> flag -> its arguments: "" (a switch), "=" (one) or "+" (several)."""
    releases: list[str] = []
    found: dict[str, dict[str, str]] = {}
    section: list[str] = []
    for line in (Path(__file__).parent / "megatron_lm_flags.txt").read_text().splitlines():
        if line.startswith("# releases: "):
            releases = line.removeprefix("# releases: ").split()
            found = {release: {} for release in releases}
        elif line.startswith("["):
            first, last = (releases.index(name) for name in line.strip("[]").split(".."))
            section = releases[first : last + 1]
        elif not line.startswith("#"):
            for word in line.split():
                flag, arguments = (word[:-1], word[-1]) if word[-1] in "=+" else (word, "")
                for release in section:
                    found[release]["--" + flag] = arguments
    return found


LISTS = megatron_lm_flags()


@pytest.mark.parametrize("release", LISTS)
def test_no_flag_of_megatron_lm_is_unknown_or_has_another_shape(release: str) -> None:
    """Each is a setting, translated, accepted, or refused with a reason; a switch stays one, a value stays one."""
    flags = LISTS[release]
    assert len(flags) >= 60
    unknown = [flag for flag in flags if flag not in ALL_FLAGS and entry_of(flag) is None]
    assert unknown == []
    own = {setting.flag: setting for setting in SETTINGS.values()}
    for flag, arguments in flags.items():
        if flag in own:
            assert (own[flag].kind is bool) == (arguments == ""), flag
            assert own[flag].kind is list or arguments != "+", flag
        elif flag in TRANSLATED:
            assert TRANSLATED[flag][0] == (arguments != ""), flag
        elif (entry := entry_of(flag)) is not None and entry.takes_value is not None:
            assert entry.takes_value == (arguments != ""), flag


def test_the_lists_are_those_of_the_releases() -> None:
    """Names that came, went and stayed, so that a list cut short does not pass."""
    assert "--calculate-per-token-loss" in LISTS["0.16.1"] and "--calculate-per-token-loss" not in LISTS["2.6"]
    assert "--no-query-key-layer-scaling" in LISTS["2.6"] and "--no-query-key-layer-scaling" not in LISTS["0.16.1"]
    assert "--step-batch-size-schedule" in LISTS["0.18.2"] and "--step-batch-size-schedule" not in LISTS["0.17.1"]
    counts = {release: len(LISTS[release]) for release in ("0.16.1", "0.17.1", "0.18.2", "0.19.0")}
    assert counts == {"0.16.1": 680, "0.17.1": 735, "0.18.2": 785, "0.19.0": 845}


def test_flags_refused_for_one_reason_are_one_problem() -> None:
    fp8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
    (problem,) = problems_of(f"{fp8} --bf16 --fp8-margin 0")
    assert problem == (
        "--fp8-format hybrid, --fp8-amax-history-len 1024, --fp8-amax-compute-algo max, --fp8-param-gather, "
        "--fp8-margin 0 are refused: FP8 and FP4 are not built here: use --bf16"
    )
    experts, stages = problems_of("--moe-router-topk 2 --account-for-loss-in-pipeline-split --num-experts 8")
    assert experts.startswith("--moe-router-topk 2, --num-experts 8 are refused: mixture of experts")
    assert stages.startswith("--account-for-loss-in-pipeline-split is refused: unequal pipeline stages")


def test_of_a_flag_of_megatron_lm_that_is_given_twice_the_last_counts() -> None:
    assert load("--optimizer sgd --normalization RMSNorm --optimizer adam").ignored_flags == (
        "--optimizer adam", "--normalization RMSNorm")  # fmt: skip
    assert len(problems_of("--optimizer adam --optimizer sgd")) == 1


def test_parts_of_what_is_not_turned_on_change_nothing() -> None:
    parts = "--fp8-margin 0 --moe-router-topk 2 --muon-momentum 0.9 --optimizer adam --kv-lora-rank 512"
    assert load(parts).ignored_flags == tuple("--" + part.strip() for part in parts.split("--")[1:])
    assert "AdamW" in problems_of("--muon-momentum 0.9 --optimizer muon")[0]
    assert problems_of("--initial-loss-scale 65536") == []
    assert "--fp16 begins with a loss scale of 2^32" in problems_of("--initial-loss-scale 65536 --fp16")[0]
    assert problems_of("--initial-loss-scale 4294967296 --fp16 --loss-scale-window 1000 --hysteresis 2") == []


def test_a_refusal_ends_with_the_command_that_works() -> None:
    argv = ["--lr", "1e-3", "--fp8-format", "hybrid", "--data-path", "0.5", "a b", "0.5", "c", "--fp8-margin=0",
            "--bf16", "--spec", "x", "y", "--ckpt-step=-1", "--seed", "a"]  # fmt: skip
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    first, *command, differs, fp8, spec = error.value.advice
    assert first == "the same without the refused flags; 2 more above to mend:"
    assert command == ["    pretrain_llama.py --lr 1e-3 --data-path 0.5 'a b' 0.5 c --bf16 --ckpt-step=-1 --seed a"]
    assert differs == "what it does, where Megatron-LM would do as the flags say:"
    assert fp8 == "    matrices are multiplied in the precision of --bf16 (--fp8-format hybrid, --fp8-margin 0)"
    assert spec == "    the model is a Llama (--spec x y)"
    with pytest.raises(ConfigError) as error:
        load_config(["--lr", "x"])
    assert error.value.advice == []


def test_the_command_of_a_refusal_is_one_for_the_shell() -> None:
    """Lines that end in a backslash; read back, it gives the same settings without a problem."""
    argv = [word for n in range(60) for word in ("--data-path", f"/data/corpus {n}'s")] + ["--num-experts", "8"]
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    command = error.value.advice[1:-2]
    assert len(command) > 10 and max(map(len, command)) < 125
    assert all(line.endswith(" \\") for line in command[:-1]) and not command[-1].endswith("\\")
    program, *words = shlex.split("\n".join(command).replace("\\\n", ""))  # as a shell joins lines
    assert program == "pretrain_llama.py" and words == argv[:-2]
    assert load_config(words).data.data_path == ["/data/corpus 59's"]


@pytest.mark.parametrize("flag", ["--tiktoken", "--use-tpu", "--micro-batch", "--xyzzy", "--tp", "--data", "--latent"])
def test_no_suggestion_where_nothing_is_close(flag: str) -> None:
    assert problems_of(f"{flag} 1") == [f"{flag} is not a flag of this program"]


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
    assert load("--rotary-seq-len-interpolation-factor 1 --use-rope-scaling").model.rope_scaling_type == "llama3"
    old = "--layernorm-epsilon 1e-6 --batch-size 4 --model-parallel-size 2 --encoder-num-layers 8 --warmup 0.1"
    config = load(f"{old} --activations-checkpoint-method uniform --activations-checkpoint-num-layers 2")
    assert (config.model.norm_epsilon, config.training.micro_batch_size, config.model.num_layers) == (1e-6, 4, 8)
    assert (config.parallel.tensor_model_parallel_size, config.optimizer.lr_warmup_fraction) == (2, 0.1)
    assert (config.parallel.recompute_granularity, config.parallel.recompute_num_layers) == ("full", 2)
    assert "must be one of uniform, block" in problems_of("--activations-checkpoint-method x")[0]
    assert "must be a number" in problems_of("--distributed-timeout-minutes x")[0]
    assert "at least 1" in problems_of("--distributed-timeout-minutes 0")[0]


def test_grouped_query_attention_needs_its_number() -> None:
    assert "needs --num-query-groups" in problems_of("--group-query-attention")[0]
    assert problems_of("--group-query-attention --num-query-groups 2") == []
