"""Write docs/reference/configuration.md from the classes: python docs/make_configuration.py

tests/config/test_config.py holds that the page is current.
"""

from pathlib import Path

from deberta_ds.config.model import MODELS
from deberta_ds.config.objective import MASK_DEFAULTS
from deberta_ds.config.options import Option, options_of, shown_default
from deberta_ds.config.run_config import run_options
from deberta_ds.corpus.filter_rules import FilterRules
from deberta_ds.corpus.recipe import Recipe
from deberta_ds.tasks.settings import Settings

PAGE = Path(__file__).with_name("reference") / "configuration.md"
HEAD = """# Options

After this page you know every key of a run file, a settings file, a filters file and a recipe.

Made by `python docs/make_configuration.py` from the classes that read the files; do not edit.

A run file is TOML with the sections below, such as `launch/runs/v3_base.toml`. `model.preset` takes
the values of a published shape (last table). Later wins: default, preset or recipe, file, and
overrides on the command line: `--train.steps=1000`, `--optim.betas=[0.9, 0.98]`. The DeepSpeed JSON
is described in `ds_configs/README.md`. `python launch/pretrain.py
--explain KEY` prints the same.

What a run file leaves open of [model] comes from a preset or from the source of `[init] from`.
`model.vocab_size` follows the tokenizer: its number of ids, padded to a multiple of 64. With
`[init]` it is the source's. A resumed run keeps the shape of its checkpoint.
"""


def page() -> str:
    """Return the whole page."""
    parts, sections = [HEAD], {}
    for option in run_options():
        section = option.key.partition(".")[0] if "." in option.key else "run"
        sections.setdefault(section, []).append(option)
    for section, options in sections.items():
        title = "## The run itself" if section == "run" else f"## [{section}]"
        parts.append(f"{title}\n\n{_table(options, '' if section == 'run' else section + '.')}")
        if section == "objective":
            recipes = [f"`{kind}`: " + ", ".join(f"{key} = {value}" for key, value in mask.items())
                       for kind, mask in MASK_DEFAULTS.items()]
            parts.append(f"Defaults of `mask` by kind, as published: {'; '.join(recipes)}.\n")
    parts.append(
        "## Fine-tuning settings\n\n`launch/finetune.py` and `launch/superglue.py`: tables [all] "
        "and [TASK] of a settings file, or `--all.epochs=3`, `--RTE.epochs=4`.\n\n"
        + _table(options_of(Settings), ""))
    parts.append(
        "## Filters\n\n`data_prep/tokenize_corpus.py --filters FILE` and `data_prep/filter.py` "
        "([Clean a corpus](../how-to/clean-a-corpus.md#filter-documents)).\n\n"
        + _table(options_of(FilterRules), ""))
    parts.append(
        "## Recipe of a corpus\n\n`data_prep/build.py --recipe FILE` "
        "([Prepare a corpus](../how-to/prepare-a-corpus.md#one-command)). "
        "`--near=0.8` overrides a value; `--explain KEY` prints the same.\n\n"
        + _table(options_of(Recipe), ""))
    parts.append("## Presets (`model.preset`)\n\n" + _presets())
    return "\n".join(parts)


def _table(options: list[Option], prefix: str) -> str:
    rows = ["| key | type | default | limits | meaning |", "|---|---|---|---|---|"]
    for option in options:
        default = option.follows or (
            "(required)" if option.required else f"`{shown_default(option)}`")
        kind = option.kind.replace("|", "\\|")
        meaning = option.meaning.replace("][", "]\\[")  # else a link
        rows.append(f"| `{option.key.removeprefix(prefix)}` | {kind} | {default} | {option.limits} "
                    f"| {meaning} |")
    return "\n".join(rows) + "\n"


def _presets() -> str:
    keys = list(dict.fromkeys(key for values in MODELS.values() for key in values))
    rows = [f"| preset | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for name, values in MODELS.items():
        cells = [str(values.get(key, "")).lower() for key in keys]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
