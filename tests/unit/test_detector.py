"""The anomaly detector: its rates on simulated norms, its rules, and equality with a plain scalar loop."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.sync.detector import AnomalyDetector

REPLICAS, MODULES, SYNCS = 4, 1250, 60  # 5,000 streams of 60 norms
WARMUP = 20
ALL_STEPPED = torch.ones(REPLICAS, dtype=torch.bool)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def flags_of(norms: Tensor, detector: AnomalyDetector | None = None) -> Tensor:
    """norms [T, R, M] -> flagged bool [T, R, M]."""
    _, num_replicas, num_modules = norms.shape
    detector = detector or AnomalyDetector(num_replicas, num_modules, warmup=WARMUP)
    stepped = torch.ones(num_replicas, dtype=torch.bool)
    return torch.stack([detector.observe(step_norms, stepped).flagged for step_norms in norms])


def share_of_tested(flagged: Tensor) -> float:
    """Flags per tested norm. The first WARMUP norms of a stream are not tested."""
    assert not flagged[:WARMUP].any()
    return flagged[WARMUP:].double().mean().item()


class TestCalibration:
    @pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.2])
    def test_healthy_streams_are_flagged_at_the_gaussian_tail_rate(self, noise: float) -> None:
        norms = 1 + noise * gaussian(SYNCS, REPLICAS, MODULES, seed=1)
        assert 0.0005 <= share_of_tested(flags_of(norms)) <= 0.004

    def test_the_rate_holds_from_the_first_tested_norm_on(self) -> None:
        flagged = flags_of(1 + 0.1 * gaussian(SYNCS, REPLICAS, MODULES, seed=2))
        assert flagged[WARMUP : WARMUP + 3].double().mean().item() <= 0.004

    @pytest.mark.parametrize("at", [20, 21, 30, 59])
    def test_six_sigma_is_caught(self, at: int) -> None:
        norms = 1 + 0.1 * gaussian(at + 1, REPLICAS, MODULES, seed=3)
        norms[at] = 1 + 6 * 0.1
        assert flags_of(norms)[at].double().mean().item() >= 0.999

    @pytest.mark.parametrize("noise", [0.05, 0.1])
    def test_a_random_walk_is_not_an_anomaly(self, noise: float) -> None:
        level = (1 + 0.005 * gaussian(SYNCS, REPLICAS, MODULES, seed=4)).cumprod(0)
        norms = level * (1 + noise * gaussian(SYNCS, REPLICAS, MODULES, seed=5))
        assert share_of_tested(flags_of(norms)) < 0.004

    def test_a_linear_rise_to_three_times_is_not_an_anomaly(self) -> None:
        level = torch.linspace(1, 3, SYNCS, dtype=torch.float64)[:, None, None]
        norms = level * (1 + 0.1 * gaussian(SYNCS, REPLICAS, MODULES, seed=6))
        assert share_of_tested(flags_of(norms)) < 0.005

    def test_a_replica_that_turns_to_twice_its_norm_stays_out(self) -> None:
        """10 % noise, after 30 healthy syncs, in 1,250 modules at once: out in each of the next 50."""
        norms = 1 + 0.1 * gaussian(80, REPLICAS, MODULES, seed=7)
        norms[30:, 1] += 1
        flagged = flags_of(norms)
        assert flagged[30:, 1].all()
        others = flagged[30:, [0, 2, 3]]
        assert others.double().mean().item() <= 0.004

    def test_so_does_one_whose_noise_doubles_with_its_norm(self) -> None:
        """As above, with a noise of 10 % of twice the norm: single norms may then be unremarkable."""
        norms = 1 + 0.1 * gaussian(80, REPLICAS, MODULES, seed=8)
        norms[30:, 1] *= 2
        flagged = flags_of(norms)[30:, 1]  # [50, M]
        assert flagged.double().mean().item() >= 0.998
        assert flagged.all(0).double().mean().item() >= 0.95

    def test_a_single_replica_and_module_of_that_kind(self) -> None:
        norms = 1 + 0.1 * gaussian(80, 2, 1, seed=9)
        norms[30:, 0] *= 2
        assert flags_of(norms)[30:, 0].all()


@pytest.mark.parametrize("level", [0.0, 1e-30, 0.1, 1.0, 1e30])
def test_identical_norms_are_never_flagged(level: float) -> None:
    detector = AnomalyDetector(2, 3, warmup=3)
    assert not flags_of(torch.full((40, 2, 3), level, dtype=torch.float64), detector).any()
    assert all(value.isfinite().all() for value in detector.state_dict().values())


def test_after_identical_norms_the_scale_is_a_thousandth_of_the_mean() -> None:
    norms = torch.ones(40, 2, 2, dtype=torch.float64)
    norms[39] = torch.tensor([[1.002, 1.01], [0.5, 1.0]])
    assert flags_of(norms)[39].tolist() == [[False, True], [False, False]]


def test_low_norms_are_not_anomalies() -> None:
    norms = 1 + 0.01 * gaussian(40, 2, 8, seed=10)
    norms[39] = 0
    assert not flags_of(norms)[39].any()


class ScalarDetector:
    """One replica and module in Python floats, with z as a quotient."""

    def __init__(self, delta: float, alpha: float, warmup: int) -> None:
        self.delta, self.alpha, self.warmup = delta, alpha, warmup
        self.n = 0

    def flags(self, g: float) -> bool:
        if self.n < self.warmup or self.delta == 0:
            return False
        sigma = math.sqrt(self.v / (1 - self.w2))
        scale = max(sigma * math.sqrt(1 + self.w2), 1e-3 * self.mu)
        at_zero_scale = math.inf if g > self.mu else 0.0
        z = (g - self.mu) / scale if scale > 0 else at_zero_scale
        delta, dof = self.delta, 1 / self.w2 - 1
        t = delta + (delta**3 + delta) / (4 * dof)
        t += (5 * delta**5 + 16 * delta**3 + 3 * delta) / (96 * dof**2)
        return z > t

    def accept(self, g: float) -> None:
        if self.n == 0:
            self.mu, self.v, self.w2, self.n = g, 0.0, 1.0, 1
            return
        a = self.alpha / (1 - (1 - self.alpha) ** (self.n + 1))
        d = g - self.mu
        self.mu += a * d
        self.v = (1 - a) * (self.v + a * d * d)
        self.w2 = (1 - a) ** 2 * self.w2 + a * a
        self.n += 1


def scalar_left_out(
    norms: list[list[list[float]]], stepped: list[list[bool]], delta: float, alpha: float, warmup: int
) -> list[list[list[bool]]]:
    """The whole rule, one number at a time: norms [T][R][M], stepped [T][R] -> left out [T][R][M]."""
    num_replicas, num_modules = len(norms[0]), len(norms[0][0])

    def fresh() -> list[ScalarDetector]:
        return [ScalarDetector(delta, alpha, warmup) for _ in range(num_replicas)]

    modules = [fresh() for _ in range(num_modules)]
    in_a_row = [0] * num_modules
    history = []
    for sync_norms, sync_stepped in zip(norms, stepped, strict=True):
        left_out = [[False] * num_modules for _ in range(num_replicas)]
        for m in range(num_modules):
            flags = 0
            for i in range(num_replicas):
                g = sync_norms[i][m]
                if not sync_stepped[i] or not math.isfinite(g):
                    left_out[i][m] = True
                elif modules[m][i].flags(g):
                    left_out[i][m] = True
                    flags += 1
                else:
                    modules[m][i].accept(g)
            in_a_row[m] = in_a_row[m] + 1 if flags > num_replicas / 2 else 0
            if in_a_row[m] == 3:
                modules[m], in_a_row[m] = fresh(), 0
        history.append(left_out)
    return history


norm_values = st.one_of(
    st.floats(0.5, 1.5), st.floats(0, 20), st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e30])
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_plain_scalar_loop(data: st.DataObject) -> None:
    replicas, modules = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    syncs = data.draw(st.integers(1, 30))
    delta = data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    alpha = data.draw(st.sampled_from([0.02, 0.3, 0.9]))
    warmup = data.draw(st.integers(3, 6))

    def lists_of(values: st.SearchStrategy, size: int) -> st.SearchStrategy:
        return st.lists(values, min_size=size, max_size=size)

    norms = data.draw(lists_of(lists_of(lists_of(norm_values, modules), replicas), syncs))
    stepped = data.draw(lists_of(lists_of(st.sampled_from([True, True, True, False]), replicas), syncs))

    detector = AnomalyDetector(replicas, modules, threshold=delta, alpha=alpha, warmup=warmup)
    left_out = [
        detector.observe(torch.tensor(g, dtype=torch.float64), torch.tensor(s)).left_out.tolist()
        for g, s in zip(norms, stepped, strict=True)
    ]
    assert left_out == scalar_left_out(norms, stepped, delta, alpha, warmup)


def test_equals_a_plain_scalar_loop_on_long_streams_with_a_shift() -> None:
    """Long enough for flags, a restart of one module (all replicas shift), and a lone high replica."""
    norms = 1 + 0.1 * gaussian(90, 3, 3, seed=11)
    norms[40:, :, 0] *= 4
    norms[50:, 1, 1] *= 3
    detector = AnomalyDetector(3, 3)
    stepped = torch.ones(3, dtype=torch.bool)
    verdicts = [detector.observe(step_norms, stepped) for step_norms in norms]
    expected = scalar_left_out(norms.tolist(), [[True] * 3] * 90, 3.0, 0.02, 20)
    assert [verdict.left_out.tolist() for verdict in verdicts] == expected
    assert [t for t, verdict in enumerate(verdicts) if verdict.restarted_modules] == [42]
    assert verdicts[42].restarted_modules == [0]


def test_equals_a_plain_scalar_loop_where_many_norms_are_close_to_the_threshold() -> None:
    norms = 1 + 0.1 * gaussian(60, 3, 40, seed=20)
    flagged = flags_of(norms, AnomalyDetector(3, 40, threshold=1.0, alpha=0.1, warmup=5))
    assert flagged.double().mean().item() > 0.1
    assert flagged.tolist() == scalar_left_out(norms.tolist(), [[True] * 3] * 60, 1.0, 0.1, 5)


def test_the_first_norm_is_the_mean() -> None:
    detector = AnomalyDetector(2, 2)
    norms = 1 + gaussian(2, 2, seed=21).abs()
    detector.observe(norms, torch.ones(2, dtype=torch.bool))
    state = detector.state_dict()
    assert torch.equal(state["mean"], norms)
    assert (state["variance"] == 0).all()
    assert (state["weight_squares"] == 1).all() and (state["accepted"] == 1).all()


class TestWhoIsLeftOut:
    def trained(self, threshold: float = 3.0) -> AnomalyDetector:
        detector = AnomalyDetector(3, 2, threshold)
        flags_of(1 + 0.1 * gaussian(30, 3, 2, seed=12), detector)
        return detector

    def test_the_kinds_are_told_apart(self) -> None:
        norms = torch.tensor([[1.0, math.nan], [5.0, math.inf], [9.0, 1.0]], dtype=torch.float64)
        verdict = self.trained().observe(norms, torch.tensor([True, True, False]))
        assert verdict.flagged.tolist() == [[False, False], [True, False], [False, False]]
        assert verdict.non_finite.tolist() == [[False, True], [False, True], [False, False]]
        assert verdict.left_out.tolist() == [[False, True], [True, True], [True, True]]

    def test_non_finite_is_left_out_in_warmup_too(self) -> None:
        norms = torch.tensor([[1.0], [math.nan], [-math.inf]], dtype=torch.float64)
        verdict = AnomalyDetector(3, 1).observe(norms, torch.ones(3, dtype=torch.bool))
        assert verdict.left_out.tolist() == [[False], [True], [True]] and not verdict.flagged.any()

    def test_threshold_0_is_off(self) -> None:
        norms = torch.tensor([[1.0, math.nan], [1e9, 1.0], [1.0, 1.0]], dtype=torch.float64)
        verdict = self.trained(threshold=0).observe(norms, torch.tensor([True, True, False]))
        assert not verdict.flagged.any()
        assert verdict.left_out.tolist() == [[False, True], [False, False], [True, True]]

    def test_what_is_left_out_does_not_enter(self) -> None:
        detector = self.trained()
        before = detector.state_dict()
        norms = torch.tensor([[100.0, math.nan], [math.inf, 50.0], [1.0, 1.0]], dtype=torch.float64)
        assert detector.observe(norms, torch.tensor([True, True, False])).left_out.all()
        after = detector.state_dict()
        for name in ("mean", "variance", "weight_squares", "accepted"):
            assert torch.equal(before[name], after[name]), name


class TestRuns:
    """Flags in a row: a restart when most replicas are flagged, warnings when one is."""

    def test_a_restart_takes_more_than_half_of_the_replicas_three_times_in_a_row(self) -> None:
        norms = 1 + 0.1 * gaussian(50, 4, 1, seed=13)
        half, most, interrupted = norms.clone(), norms.clone(), norms.clone()
        half[30:, :2] += 5
        most[30:, :3] += 5
        interrupted[30:, :3] += 5
        interrupted[32, :3] -= 5

        def restarts(stream: Tensor) -> list[int]:
            detector = AnomalyDetector(4, 1)
            verdicts = [detector.observe(step_norms, ALL_STEPPED) for step_norms in stream]
            return [t for t, verdict in enumerate(verdicts) if verdict.restarted_modules == [0]]

        assert restarts(half) == []
        assert restarts(most) == [32]
        assert restarts(interrupted) == [35]

    def test_a_restarted_module_is_in_warmup_again_and_others_are_not_touched(self) -> None:
        detector = AnomalyDetector(2, 2, warmup=5)
        norms = 1 + 0.1 * gaussian(20, 2, 2, seed=14)
        norms[10:, :, 1] += 5
        flagged = flags_of(norms, detector)
        assert flagged[10:13, :, 1].all() and not flagged[13:, :, 1].any()
        assert detector.state_dict()["accepted"].tolist() == [[20, 7], [20, 7]]

    def test_a_replica_that_stays_high_is_reported_at_every_tenth_flag(self) -> None:
        norms = 1 + 0.01 * gaussian(60, 3, 2, seed=15)
        norms[25:55, 2, 1] += 5
        detector = AnomalyDetector(3, 2)
        reports = {}
        for t, step_norms in enumerate(norms):
            verdict = detector.observe(step_norms, torch.ones(3, dtype=torch.bool))
            if verdict.stays_high:
                reports[t] = verdict.stays_high
        assert reports == {34: [(2, 1, 10)], 44: [(2, 1, 20)], 54: [(2, 1, 30)]}

    def test_a_sync_without_an_observation_neither_ends_nor_lengthens_the_row(self) -> None:
        detector = AnomalyDetector(3, 1, warmup=3)
        flags_of(1 + 0.01 * gaussian(10, 3, 1, seed=16), detector)
        high = torch.tensor([[9.0], [1.0], [1.0]], dtype=torch.float64)
        stepped = torch.ones(3, dtype=torch.bool)
        for _ in range(9):
            assert detector.observe(high, stepped).stays_high == []
        assert detector.observe(high, torch.tensor([False, True, True])).stays_high == []
        assert detector.observe(high, stepped).stays_high == [(0, 0, 10)]


class TestSyncsOfSomeModules:
    """Streaming: a sync is of the modules that are due; stepped may differ from module to module."""

    def test_a_module_that_is_not_due_sees_and_says_nothing(self) -> None:
        detector = AnomalyDetector(4, 2, warmup=3)
        norms = 1 + 0.01 * gaussian(12, 4, 2, seed=30)
        norms[10:, :3] += 5  # most replicas: two syncs into a row of three
        flags_of(norms, detector)
        before = {name: value.clone() for name, value in detector.state_dict().items()}
        assert before["majority_streak"].tolist() == [2, 2] and before["streak"].any()
        bad = torch.full((4, 2), math.nan, dtype=torch.float64)
        verdict = detector.observe(bad, torch.zeros(4, dtype=torch.bool), torch.tensor([False, False]))
        for name in ("flagged", "non_finite", "left_out", "restarted"):
            assert not getattr(verdict, name).any(), name
        assert verdict.stays_high == []
        for name, value in detector.state_dict().items():
            assert torch.equal(value, before[name]), name
        verdict = detector.observe(norms[-1], ALL_STEPPED, torch.tensor([True, False]))
        assert verdict.restarted_modules == [0] and verdict.left_out.tolist() == [[True, False]] * 3 + [[False] * 2]
        assert detector.state_dict()["majority_streak"].tolist() == [0, 2]

    def test_alternating_syncs_equal_a_detector_of_each_module(self) -> None:
        norms = 1 + 0.1 * gaussian(60, 3, 2, seed=31)
        norms[40:, 1, 0] *= 3
        norms[50:, :, 1] *= 4
        norms[20, 2, 1] = math.nan
        stepped = torch.ones(60, 3, 2, dtype=torch.bool)
        stepped[30, 0] = torch.tensor([False, True])
        both = AnomalyDetector(3, 2)
        alone = [AnomalyDetector(3, 1), AnomalyDetector(3, 1)]
        flags = 0
        for t in range(60):
            for m in range(2):
                due = torch.arange(2) == m
                found = both.observe(norms[t].masked_fill(~due, math.nan), stepped[t], due)
                expected = alone[m].observe(norms[t, :, m : m + 1], stepped[t, :, m])
                for name in ("flagged", "non_finite", "left_out", "streak"):
                    assert torch.equal(getattr(found, name)[:, m], getattr(expected, name)[:, 0]), name
                assert not found.left_out[:, 1 - m].any()
                assert found.restarted_modules == [m] * len(expected.restarted_modules)
                flags += int(found.flagged.sum())
        assert flags > 20

    def test_due_everywhere_is_the_default(self) -> None:
        norms = 1 + 0.1 * gaussian(40, 4, 3, seed=32)
        norms[30:, 1] *= 3
        default, explicit = AnomalyDetector(4, 3), AnomalyDetector(4, 3)
        for step_norms in norms:
            stepped = ALL_STEPPED[:, None].expand(4, 3)
            first = default.observe(step_norms, ALL_STEPPED)
            second = explicit.observe(step_norms, stepped, torch.ones(3, dtype=torch.bool))
            assert torch.equal(first.left_out, second.left_out)
        for name, value in default.state_dict().items():
            assert torch.equal(value, explicit.state_dict()[name]), name


class TestState:
    def test_a_loaded_detector_goes_on_bit_equal(self) -> None:
        norms = 1 + 0.1 * gaussian(80, 4, 5, seed=17)
        norms[40:, :, 2] *= 3
        norms[30:, 1, 4] *= 3
        straight = AnomalyDetector(4, 5)
        flags_of(norms[:41], straight)  # in the middle of a row of flags of most replicas
        resumed = AnomalyDetector(4, 5)
        resumed.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
        assert torch.equal(flags_of(norms[41:], straight), flags_of(norms[41:], resumed))
        for name, value in straight.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name

    def test_a_saved_state_does_not_change_later(self) -> None:
        detector = AnomalyDetector(2, 2)
        flags_of(1 + 0.1 * gaussian(5, 2, 2, seed=18), detector)
        saved = detector.state_dict()
        copies = {name: value.clone() for name, value in saved.items()}
        flags_of(1 + 0.1 * gaussian(5, 2, 2, seed=19), detector)
        assert all(torch.equal(saved[name], copies[name]) for name in saved)

    def test_a_state_of_other_sizes_is_refused(self) -> None:
        detector = AnomalyDetector(2, 3)
        with pytest.raises(ValueError, match=r"\[4, 3\].*\[2, 3\]"):
            detector.load_state_dict(AnomalyDetector(4, 3).state_dict())
        with pytest.raises(ValueError, match="mean"):
            detector.load_state_dict({})


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"threshold": -1.0}, "-1.0"),
        ({"threshold": math.nan}, "nan"),
        ({"alpha": 0.0}, "0.0"),
        ({"alpha": 1.0}, "1.0"),
        ({"warmup": 2}, "2"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], value: str) -> None:
    with pytest.raises(ValueError, match=f"got {value}; try"):
        AnomalyDetector(2, 2, **settings)


def test_columns_follow_their_replicas() -> None:
    """Replicas 0 and 2 of three stay, the other way round, and a newcomer's column is empty."""
    detector = AnomalyDetector(3, 2, warmup=3)
    for sync in range(4):
        norms = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64) + 0.01 * sync
        detector.observe(norms, torch.ones(3, dtype=torch.bool))
    before = detector.state_dict()
    detector.follow([2, None, 0])
    after = detector.state_dict()
    for name in before.keys() - {"majority_streak"}:
        assert torch.equal(after[name][0], before[name][2]) and torch.equal(after[name][2], before[name][0])
        assert not after[name][1].any() and after[name].dtype == before[name].dtype
    assert after["majority_streak"].tolist() == [0, 0]
