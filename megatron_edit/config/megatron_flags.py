"""Megatron-LM's flags that this program has no setting for: accepted, translated, or refused.

A script written for Megatron-LM should run here with the same meaning or not at all. Flags whose effect
this program always has (or that only steer kernels and overlap) are accepted and listed in one warning
line; a few are spelled differently here and translated; those that would change the result, and are not
built, are refused, with what the run would be without them. The names are in `megatron_accepted.py` and
`megatron_refused.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_edit.config.data_args import read_data_args, read_per_split_data_args
from megatron_edit.config.megatron_accepted import (
    ONE_VALUE,
    ONE_VALUE_BESIDE,
    SWITCHES_WITHOUT_EFFECT,
    VALUES_WITHOUT_EFFECT,
)
from megatron_edit.config.megatron_refused import REFUSALS

FlagGroup = tuple[str, list[str]]  # a flag and the arguments that follow it


@dataclass(frozen=True)
class MegatronFlag:
    """What becomes of one flag.

    takes_value  whether it has arguments; None: not checked
    allowed      None = accepted whatever the value; otherwise only these values are, so an empty tuple refuses it
    reason       shown when it is refused
    instead      what the run does without it
    beside       it is refused only when one of these flags is given too (and refused, if it is not a setting)
    """

    takes_value: bool | None = False
    allowed: tuple[str, ...] | None = None
    reason: str = ""
    instead: str = ""
    beside: tuple[str, ...] = ()

    def accepts(self, values: Sequence[str]) -> bool:
        """Whether the flag with these arguments changes nothing here, whatever else is given."""
        if self.allowed is None:
            return True
        return bool(values) and all(any(_same(value, allowed) for allowed in self.allowed) for value in values)


def _same(given: str, allowed: str) -> bool:
    try:
        return float(given) == float(allowed)
    except ValueError:
        return given.lower() == allowed.lower()


def _table() -> dict[str, MegatronFlag]:
    rows: list[tuple[str, MegatronFlag]] = [(flag, MegatronFlag()) for flag in SWITCHES_WITHOUT_EFFECT.split()]
    rows += [(flag, MegatronFlag(takes_value=True)) for flag in VALUES_WITHOUT_EFFECT.split()]
    for flag, (values, why) in ONE_VALUE.items():
        rows.append((flag, MegatronFlag(True, tuple(values.split()), why, why)))
    for flag, (values, why, other) in ONE_VALUE_BESIDE.items():
        rows.append((flag, MegatronFlag(True, tuple(values.split()), why, why, (other,))))
    for refusal in REFUSALS:
        entry = MegatronFlag(None, (), refusal.why, refusal.instead)
        leaders = (*refusal.flags.split(), *refusal.of.split())
        rows += [(flag, entry) for flag in refusal.flags.split()]
        rows += [(flag, replace(entry, beside=leaders)) for flag in refusal.parts.split()]
    table = dict(rows)
    assert len(table) == len(rows), "a flag stands in two places"
    return table


MEGATRON_FLAGS: dict[str, MegatronFlag] = _table()
# every other flag of mixture of experts begins so
MOE_PREFIX = "--moe-"
_MOE = replace(MEGATRON_FLAGS["--num-experts"], beside=("--num-experts",))


def entry_of(flag: str) -> MegatronFlag | None:
    """What becomes of `flag`; None for one that Megatron-LM does not have, or that is a setting or translated."""
    return MEGATRON_FLAGS.get(flag) or (_MOE if flag.startswith(MOE_PREFIX) else None)


# ---- what was given ------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What became of the flags that were given. `refused`: (flags as given, what the run does without them)."""

    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: list[tuple[list[str], str]] = field(default_factory=list)
    refused_flags: set[str] = field(default_factory=set)


def judge(groups: Sequence[FlagGroup], is_on: Callable[[str], bool]) -> Verdict:
    """Looks at the flags of `groups` that `entry_of` knows. `is_on`: whether a setting's flag is in force.

    Flags that are refused for one reason share one problem. Of a flag that is given twice the last one counts.
    """
    verdict = Verdict()
    given = dict(groups)
    known = [(flag, values, entry) for flag, values in given.items() if (entry := entry_of(flag)) is not None]
    verdict.refused_flags = {flag for flag, values, entry in known if not entry.beside and not entry.accepts(values)}
    leading = set(verdict.refused_flags)
    by_reason: dict[tuple[str, str], tuple[list[str], str]] = {}
    for flag, values, entry in known:
        shown = " ".join([flag, *values])
        alone = bool(entry.beside) and not any(leader in leading or is_on(leader) for leader in entry.beside)
        if not alone and not entry.accepts(values):
            verdict.refused_flags.add(flag)
            only = f"; only {flag} {' or '.join(entry.allowed)} is accepted" if entry.allowed else ""
            by_reason.setdefault((entry.reason, only), ([], entry.instead))[0].append(shown)
        elif entry.takes_value is not None and entry.takes_value != bool(values):
            expected = "needs a value" if entry.takes_value else "is a switch and takes no value"
            verdict.problems.append(f"{flag} {expected}")
        else:
            verdict.ignored.append(shown)
    for (reason, only), (flags, _) in by_reason.items():
        verdict.problems.append(f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} refused: {reason}{only}")
    verdict.refused = list(by_reason.values())
    return verdict


def command_without(groups: Sequence[FlagGroup], verdict: Verdict, other_problems: int) -> list[str]:
    """Lines that show the command without what was refused, to be copied, and what it does differently; [] if
    nothing was refused."""
    if not verdict.refused:
        return []
    words = [_as_words(flag, values) for flag, values in groups if flag not in verdict.refused_flags]
    remain = f"; {other_problems} more above to mend" if other_problems else ""
    return [
        f"the same without the refused flags{remain}:",
        *_wrapped(["pretrain_llama.py", *words]),
        "what it does, where Megatron-LM would do as the flags say:",
        *(f"    {instead} ({', '.join(flags)})" for flags, instead in verdict.refused),
    ]


def _as_words(flag: str, values: list[str]) -> str:
    if len(values) == 1 and values[0].startswith("-"):
        return shlex.quote(f"{flag}={values[0]}")
    return shlex.join([flag, *values])


def _wrapped(words: Sequence[str], width: int = 112) -> list[str]:
    """Lines of a shell command, as wide as `width` where words allow."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [f"    {line}{' ' + chr(92) if line is not lines[-1] else ''}" for line in lines]


# ---- other spellings -----------------------------------------------------------------------------------------------


def _interpolation(text: str) -> dict[str, Any]:
    factor = float(text)
    return {} if factor == 1 else {"rope_scaling_type": "linear", "rope_scaling_factor": factor}


# Megatron's spelling -> how many arguments, and what they set here
TRANSLATED: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {  # raise ValueError
    "--use-rope-scaling": (0, lambda _: {"rope_scaling_type": "llama3"}),
    "--rotary-seq-len-interpolation-factor": (1, _interpolation),
    "--recompute-activations": (0, lambda _: {"recompute_granularity": "selective"}),
    "--activations-checkpoint-method": (1, lambda v: {"recompute_granularity": "full", "recompute_method": v}),
    "--activations-checkpoint-num-layers": (1, lambda v: {"recompute_num_layers": int(v)}),
    "--override-opt_param-scheduler": (0, lambda _: {"override_opt_param_scheduler": True}),
    "--use-checkpoint-opt_param-scheduler": (0, lambda _: {"use_checkpoint_opt_param_scheduler": True}),
    "--override-lr-scheduler": (0, lambda _: {"override_opt_param_scheduler": True}),
    "--use-checkpoint-lr-scheduler": (0, lambda _: {"use_checkpoint_opt_param_scheduler": True}),
    "--data-args-path": (1, read_data_args),
    "--per-split-data-args-path": (1, read_per_split_data_args),
    "--distributed-timeout-minutes": (1, lambda v: {"distributed_timeout_seconds": int(v) * 60}),
    "--persistent-save-interval": (1, lambda v: {"save_interval": int(v)}),
    "--layernorm-epsilon": (1, lambda v: {"norm_epsilon": float(v)}),
    "--batch-size": (1, lambda v: {"micro_batch_size": int(v)}),
    "--model-parallel-size": (1, lambda v: {"tensor_model_parallel_size": int(v)}),
    "--encoder-num-layers": (1, lambda v: {"num_layers": int(v)}),
    "--encoder-seq-length": (1, lambda v: {"seq_length": int(v)}),
    "--warmup": (1, lambda v: {"lr_warmup_fraction": float(v)}),
}
