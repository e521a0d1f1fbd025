"""Writes docs/flags.md from the settings' schema; with --check it only says whether the file is up to date.

usage: python tools/document_flags.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_edit.config.megatron_flags import MEGATRON_FLAGS, TRANSLATED  # noqa: E402
from megatron_edit.config.megatron_refused import REFUSALS  # noqa: E402
from megatron_edit.config.presets import PRESETS  # noqa: E402
from megatron_edit.config.printing import default_text  # noqa: E402
from megatron_edit.config.schema import SECTIONS  # noqa: E402
from megatron_edit.config.settings import SETTINGS, Setting  # noqa: E402

FILE = ROOT / "docs" / "flags.md"

HEAD = """\
# Every flag

`python tools/document_flags.py` writes this page from `megatron_edit/config/schema.py`; do not edit it.

A setting has one name: `--micro-batch-size 4` on the command line is `micro_batch_size: 4` in the file of
`--config FILE.yaml`, flat or under its section. Flags win over the file, the file over the preset of
`--model-size`, the preset over the defaults; `--print-config` shows every value with its source, as YAML.
Switches have no value; `--no-NAME` turns one off. Names are not abbreviated, unknown ones are refused. A flag
that is given twice holds its last value. A `-` in the column "default" means: not given, and the help says
what then holds.

In the file a value without quotes means what the same text means after a flag: numbers are plain decimal numbers
(`0123`, `1:30` and `1_000`, which YAML 1.1 reads as 83, 90 and 1000, are refused), text is what is written (`007`, `no`
and `2024-01-31` are names), `true`, `yes` and `on` turn a switch on, `null` leaves a setting out.

In paths, in flags and in the file, a leading `~` and `$VAR` or `${VAR}` expand; a variable that is not set or empty is
an error; `$$` stands for one `$`. The tools do the same.
"""

MEGATRON_HEAD = """\
## Megatron-LM's other flags

The settings above have Megatron-LM's names and meaning where it has them. Of its other flags, those without
effect here are accepted, and listed in one warning line at the start; those that would change the result are
refused.
"""

REFUSED = """\
Refused. What stands in the second column is refused only beside one of the first, and without effect otherwise. Every
flag that begins with `--moe-` goes with `--num-experts`."""


def text() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, cls in SECTIONS.items():
        settings = [s for s in SETTINGS.values() if s.section == section]
        parts.append(_section(section, cls.__doc__ or "", settings))
    parts += [_presets(), MEGATRON_HEAD, _megatron()]
    return "\n".join(parts)


def _section(section: str, doc: str, settings: list[Setting]) -> str:
    rows = [_row(s) for s in settings]
    head = ["flag", "type", "default", "what it is", "source of the default"]
    return "\n".join([f"## {section}\n", doc.strip() + "\n", *_table(head, rows), ""])


def _row(setting: Setting) -> list[str]:
    default = default_text(setting)
    bounds = [
        f"{sign} {bound:.10g}"
        for sign, bound in (("≥", setting.minimum), (">", setting.above), ("<", setting.below))
        if bound is not None
    ]
    kind = "switch" if setting.kind is bool else setting.placeholder
    return [
        f"`{setting.flag}`",
        f"`{kind}`" + (" " + ", ".join(bounds) if bounds else ""),
        "-" if default is None else f"`{default}`",
        setting.help,
        setting.source or "",
    ]


def _presets() -> str:
    names = list(dict.fromkeys(name for preset in PRESETS.values() for name in preset))
    rows = [
        [f"`{size}`", *(str(preset.get(name, SETTINGS[name].default)) for name in names)]
        for size, preset in PRESETS.items()
    ]
    note = "Where the shapes come from is said in `megatron_edit/config/presets.py`.\n"
    return "\n".join(["## Presets of --model-size\n", note, *_table(["size", *names], rows), ""])


def _megatron() -> str:
    accepted = [f for f, entry in MEGATRON_FLAGS.items() if entry.allowed is None]
    limited = {f: entry for f, entry in MEGATRON_FLAGS.items() if entry.allowed}
    lines = ["Accepted without effect: " + _names(accepted) + ".", ""]
    lines += ["Translated: " + _names(TRANSLATED) + ".", ""]
    lines += ["Accepted with one value:", ""]
    rows = []
    for flag, entry in sorted(limited.items()):
        beside = f" (without {_names(entry.beside)}: any)" if entry.beside else ""
        rows.append([f"`{flag}`", " or ".join(f"`{v}`" for v in entry.allowed or ()) + beside, entry.reason])
    lines += _table(["flag", "value", "because"], rows)
    lines += ["", REFUSED, ""]
    rows = []
    for refusal in sorted(REFUSALS, key=lambda r: (r.flags + r.of).split()[0]):
        also = f" (beside {_names(refusal.of.split())} where that is refused)" if refusal.of else ""
        rows.append([_names(refusal.flags.split()), _names(refusal.parts.split()) + also, refusal.why, refusal.instead])
    lines += _table(["flags", "their parts", "because", "without them"], rows)
    return "\n".join([*lines, ""])


def _names(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in sorted(flags))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def main(arguments: list[str]) -> int:
    """Exit code: 0 written or up to date, 1 stale, 2 bad arguments."""
    if arguments == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == text():
            return 0
        print(f"{FILE.relative_to(ROOT)} is stale: run python tools/document_flags.py", file=sys.stderr)
        return 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
