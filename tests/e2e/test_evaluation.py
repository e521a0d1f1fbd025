"""Field report B19: one validation loss in every layout, equal to an offline mean; evaluation disturbs nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess
from megatron_edit.data.tokenizers import ByteTokenizer
from tests.e2e.conftest import Corpora
from tests.e2e.runs import differences, evaluations, losses, start, train, training_lines, weights_of
from tests.reference.plain_edit import LlamaShape, PlainLlama

SEQ_LENGTH = 32
EOD = ByteTokenizer.eod_id


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Two validation sets of documents of unequal length: prefix -> all ids, in file order. 17 and 6 samples."""
    folder = tmp_path_factory.mktemp("held out")
    found = {}
    for name, lengths in (("a", [3, 0, 0, 170, 1, 60, 0, 299]), ("b", [150, 47])):
        texts = ["".join(chr(97 + (7 * i + length) % 26) for i in range(length)) for length in lengths]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text + "."}) + "\n" for text in texts))
        spec = TokenizerSpec("ByteTokenizer")
        (report,) = preprocess(
            [str(folder / f"{name}.jsonl")], str(folder / name), spec, append_eod=True, log=lambda line: None
        )
        found[report.prefix] = [i for text in texts for i in [*ByteTokenizer().tokenize(text + "."), EOD]]
    assert [(len(ids) - 1) // SEQ_LENGTH for ids in found.values()] == [17, 6]
    return found


def offline_loss(final: Path, documents: list[list[int]], *, mask_after_end: bool) -> float:
    """Mean over the tokens of all whole samples, by a model that shares no code with the program."""
    weights = {
        name: tensor.double() for name, tensor in weights_of(final, "model.").items()
    }
    model = PlainLlama(LlamaShape(4, 64, 128, 8, 2, 259, 8), weights)
    loss_sum, tokens = 0.0, 0
    for ids in documents:
        for first in range(0, len(ids) - SEQ_LENGTH, SEQ_LENGTH):
            sample = torch.tensor(ids[first : first + SEQ_LENGTH + 1])
            logits = model.logits(sample[None, :-1])[0]  # [S, V]
            each = torch.nn.functional.cross_entropy(logits, sample[1:], reduction="none")
            counts = (sample[:-1] != EOD) if mask_after_end else torch.ones(SEQ_LENGTH, dtype=torch.bool)
            loss_sum, tokens = loss_sum + float(each[counts].sum()), tokens + int(counts.sum())
    return loss_sum / tokens


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"edit_num_replicas": 1}),
    "one replica of two": (2, {"edit_num_replicas": 1}),
    "two replicas": (2, {}),
    "two replicas of two": (4, {}),
    "three replicas": (3, {"edit_num_replicas": 3, "global_batch_size": 6}),
    "last batch almost empty": (2, {"global_batch_size": 20}),
    "micro batch 1": (2, {"micro_batch_size": 1}),
    "tensor parallel": (2, {"edit_num_replicas": 1, "tensor_model_parallel_size": 2}),
    "pipeline": (2, {"edit_num_replicas": 1, "pipeline_model_parallel_size": 2}),
    "interleaved pipeline": (
        2,
        {
            "edit_num_replicas": 1,
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
            "micro_batch_size": 1,  # 23 samples: an odd number of microbatches, which the schedule does not take
        },
    ),
}


@pytest.mark.parametrize(
    "mask_after_end",
    [
        pytest.param(False, id="all tokens", marks=pytest.mark.full(reason="the easier half of the same")),
        pytest.param(True, id="masked"),
    ],
)
def test_one_value_in_every_layout(
    mask_after_end: bool, corpora: Corpora, held_out: dict[str, list[int]], tmp_path: Path
) -> None:
    found = {}
    for name, (world_size, layout) in LAYOUTS.items():
        result = train(world_size, **layout, mock_data=None, train_data_path=[corpora.documents_200],
                       valid_data_path=list(held_out), tokenizer_type="ByteTokenizer", train_iters=0, eval_iters=99,
                       init_method_std=0.5, eod_mask_loss=mask_after_end, save=str(tmp_path / name))  # fmt: skip
        found[name] = evaluations(result.stdout)[0]
    expected = offline_loss(tmp_path / "one rank" / "final", list(held_out.values()), mask_after_end=mask_after_end)
    assert expected > 8  # far from the loss of equal guesses, so the samples do not all count alike
    assert found == pytest.approx(dict.fromkeys(LAYOUTS, expected), rel=1e-5)


def test_named_sets_have_a_loss_each_and_the_z_loss_is_in_none(
    corpora: Corpora, held_out: dict[str, list[int]], tmp_path: Path
) -> None:
    """In log and metrics.jsonl, at the interval and at the end; a set without files is refused."""
    a, b = held_out
    settings = {"mock_data": None, "train_data_path": [corpora.documents_200], "tokenizer_type": "ByteTokenizer",
                "train_iters": 2, "edit_sync_interval": 1, "eval_interval": 1, "eval_iters": 99,
                "save": str(tmp_path / "run"), "z_loss_coeff": 0.01, "lr": 1e-9}  # fmt: skip
    result = train(2, **settings, valid_data_path=[f"first={a}", "second=1", b])
    found = re.findall(r"^ validation loss at iteration (\d) on (\w+) \| lm loss value: (\S+) \|", result.stdout, re.M)
    assert [(k, name) for k, name, _ in found] == [(k, name) for k in "12" for name in ("first", "second")]
    expected = [offline_loss(tmp_path / "run" / "final", [ids], mask_after_end=False) for ids in held_out.values()]
    assert [float(loss) for *_, loss in found[-2:]] == pytest.approx(expected, rel=1e-5)
    assert abs(expected[0] - expected[1]) > 5e-4
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    recorded = [(str(record["iteration"]), record["set"]) for record in records if record["kind"] == "eval"]
    assert recorded == [(k, name) for k, name, _ in found]
    fields = training_lines(result.stdout)[2]
    log_z = math.sqrt(float(fields["z loss"]) / 0.01)  # of initial weights: near log(259), as the loss
    assert log_z == pytest.approx(float(fields["lm loss"]), rel=0.05) == pytest.approx(math.log(259), rel=0.05)

    refused = start(1, **{**settings, "edit_num_replicas": 1}, valid_data_path=[f"first={a}", "other=/nowhere/c"])
    assert refused.exit_codes == [2] and "/nowhere/c" in refused.stderr


def test_the_first_samples_when_iterations_are_few(
    corpora: Corpora, held_out: dict[str, list[int]], tmp_path: Path
) -> None:
    """--eval-iters 1 with a global batch of 8: the first eight samples, whatever the layout."""
    prefix, ids = next(iter(held_out.items()))
    settings = {"mock_data": None, "train_data_path": [corpora.documents_200], "valid_data_path": [prefix],
                "tokenizer_type": "ByteTokenizer", "train_iters": 0, "eval_iters": 1, "init_method_std": 0.5,
                "save": str(tmp_path / "run")}  # fmt: skip
    found = [evaluations(train(n, **settings, edit_num_replicas=n).stdout)[0] for n in (1, 2, 4)]
    expected = offline_loss(tmp_path / "run" / "final", [ids[: 8 * SEQ_LENGTH + 1]], mask_after_end=False)
    assert found == pytest.approx([expected] * 3, rel=1e-5)


def test_a_trained_model_is_evaluated_on_what_is_exported(
    corpora: Corpora, held_out: dict[str, list[int]], tmp_path: Path
) -> None:
    """Two replicas that differ at the end: the loss printed last is that of final/, the mean of both."""
    result = train(2, mock_data=None, train_data_path=[corpora.documents_200], valid_data_path=list(held_out),
                   tokenizer_type="ByteTokenizer", train_iters=10, eval_iters=99, lr=3e-3,
                   save=str(tmp_path / "run"))  # fmt: skip
    expected = offline_loss(tmp_path / "run" / "final", list(held_out.values()), mask_after_end=False)
    assert expected < math.log(259) - 0.5
    assert evaluations(result.stdout)[10] == pytest.approx(expected, rel=1e-5)


def test_nothing_evaluated_is_said(tmp_path: Path) -> None:
    result = train(2, eval_iters=0, eval_interval=4)
    assert evaluations(result.stdout) == {}
    assert "--eval-interval 4 with --eval-iters 0: nothing is evaluated" in result.stdout
    assert "nothing was evaluated" in result.stdout.splitlines()[-1]


def test_the_last_iteration_is_evaluated_when_the_interval_says_so() -> None:
    """Without the evaluation at the end it is one like the others; with it there is no second one."""
    settings = {"train_iters": 6, "eval_interval": 3, "eval_iters": 2}
    longer = evaluations(train(2, **{**settings, "train_iters": 7}).stdout)
    without = evaluations(train(2, **settings, eval_at_end=False).stdout)
    assert without == {3: longer[3], 6: longer[6]}
    with_it = train(2, **settings).stdout
    assert list(evaluations(with_it)) == [3, 6] and with_it.count("validation loss at iteration 6") == 1


def test_evaluation_leaves_training_as_it_is(tmp_path: Path) -> None:
    """Evaluated between, on and after syncs, with dropout: bit-equal to a run that never evaluates."""
    settings = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "train_iters": 10}
    with_evaluation = train(2, **settings, eval_interval=1, eval_iters=2, save=str(tmp_path / "with"))
    without = train(2, **settings, eval_iters=0, save=str(tmp_path / "without"))
    assert losses(with_evaluation.stdout) == losses(without.stdout)
    assert len(losses(without.stdout)) == 10
    assert differences(tmp_path / "with" / "iter_0000010", tmp_path / "without" / "iter_0000010") == []
    assert differences(tmp_path / "with" / "final", tmp_path / "without" / "final") == []
    assert sorted(evaluations(with_evaluation.stdout)) == list(range(1, 11))


def test_evaluation_between_syncs_is_of_the_anchor(tmp_path: Path) -> None:
    """B48: at iteration 7 the anchor is still that of the sync after iteration 4."""
    found = evaluations(train(2, train_iters=8, eval_interval=1, eval_iters=2).stdout)
    assert found[4] == found[5] == found[6] == found[7]
    assert found[1] == found[2] == found[3] != found[4]
    assert found[8] != found[7]


def test_the_same_samples_after_a_restart(corpora: Corpora, held_out: dict[str, list[int]], tmp_path: Path) -> None:
    settings = {"mock_data": None, "train_data_path": [corpora.documents_200], "valid_data_path": list(held_out),
                "tokenizer_type": "ByteTokenizer", "train_iters": 10, "eval_interval": 4, "eval_iters": 2}  # fmt: skip
    straight = evaluations(train(2, **settings, save=str(tmp_path / "a")).stdout)
    folder = str(tmp_path / "b")
    first = evaluations(train(2, **settings, save=folder, load=folder, exit_interval=6).stdout)
    second = evaluations(train(2, **settings, save=folder, load=folder).stdout)
    assert (sorted(first), sorted(second)) == ([4], [8, 10])
    assert {**first, **second} == straight
