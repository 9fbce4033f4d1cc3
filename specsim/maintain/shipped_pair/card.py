"""Model card of a pair, from its manifest and the figures of its training."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specsim.core.kinds import KINDS
from specsim.core.metrics import LOOP_SHARE
from specsim.maintain.page import markdown
from specsim.maintain.shipped_pair.prompts import RULE
from specsim.maintain.shipped_pair.recipe import ARCHITECTURES, Recipe
from specsim.training.estimate import NEW_TOKENS

CARD = """# The tiny pair: a target and its drafters

A Llama of {figures[target][parameters]:,} parameters that writes Python, and drafters of several architectures for it.
It exists to watch, test and teach speculative decoding on a trained pair without a download; it is no coding assistant.
Accept lengths are the trainer's own estimate: chains of 3 drafts at temperature 0, bonus included.

{models}

- Target: {recipe.num_layers} layers, hidden {recipe.hidden_size}, {recipe.num_heads} query and {recipe.num_kv_heads}
  key-value heads, intermediate {recipe.intermediate_size}, tied embedding, byte-level BPE of {recipe.vocab_size}.
{architectures}
- Drafters learned the target's distributions on windows of up to {recipe.continued_len} tokens: {recipe.prompt_len} of
  corpus text that the target continued, greedily or by sampling. Weights are stored in bfloat16.
{trained}
## Corpus and licences

{manifest[train][files]:,} files of Python source ({manifest[train][bytes]:,} bytes, {figures[target][tokens]:,} tokens)
from CPython's library and the installed distributions that declare a permissive licence. Left out are bundled
third-party folders, generated files, files with a copyleft or proprietary notice, and
{manifest[removed][exact_duplicates]} exact duplicates. {manifest[heldout][files]} whole files are held out, and
{manifest[removed][near_duplicates_of_heldout]} files that nearly duplicate one of them were removed. `manifest.json`
lists the distributions with their versions and licences, the hash of the selection and every held-out file.

{licences}

`prompts.jsonl` holds excerpts of held-out files, each under the licence it names. {prompt_rule}

`text.jsonl` holds excerpts, chosen in the same way, of files that are not held out. Notebook 16 trains a head on them.

## Losses

Nats a token over windows of {recipe.target_window} tokens, after {figures[target][tokens_seen]:,} tokens of training:
held-out files **{figures[target][heldout_loss]:.3f}**, training files {figures[target][train_loss]:.3f}.

## Acceptance

{measured}

The trainer's own estimate, on continuations of the prompts by {new_tokens} tokens: mean accept length (bonus included)
and, for each draft of the chain, how often it was accepted. A continuation loops if fewer than {loops_below:.0%} of its
4-grams are distinct.

{acceptance}

## Command

    python -m specsim.maintain.shipped_pair.train --manifest specsim/models/shipped/tiny/manifest.json

`--smoke` trains a toy pair of the same formats on a CPU within a minute. A drafter that was interrupted goes on where
it stopped. `specsim train` trains one drafter for any target of the family.
"""
ACCEPTANCE = ("drafter", "T", "chain", "prompts", "accept length", "accepted by position")
UNMEASURED = "`specsim accept` has not been run on this pair yet."


def write_card(recipe: Recipe, folder: Path) -> str:
    """Fill the card of the pair in `folder` from manifest.json, training.json and, if present, acceptance.json."""
    manifest, figures = (json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "training"))
    accepted = folder / "acceptance.json"
    drafters = [name for name in ARCHITECTURES if name in figures]
    return CARD.format(
        recipe=recipe,
        models="\n".join(_model_rows(figures, drafters)),
        architectures="\n".join(_architecture(name, recipe, figures[name]) for name in drafters),
        trained="".join(line for name in drafters for line in _trained_lines(name, recipe, figures[name])),
        manifest=manifest,
        figures=figures,
        licences="\n".join(markdown(("licence", "bytes", "distributions"), _licence_rows(manifest["distributions"]))),
        prompt_rule=RULE.format(a_distribution=recipe.prompts_a_distribution),
        measured=_measured(json.loads(accepted.read_text())) if accepted.exists() else UNMEASURED,
        new_tokens=NEW_TOKENS,
        loops_below=LOOP_SHARE,
        acceptance="\n".join(markdown(ACCEPTANCE, _acceptance_rows(figures, drafters))),
    )


def prompts_of(setting: Mapping[str, Any]) -> str:
    """Name the prompts of a setting of `specsim accept`; results from before there were edits do not say."""
    return "edits" if setting.get("prompt_set") == "edits" else "held-out"


def _architecture(name: str, recipe: Recipe, figures: dict) -> str:
    """Describe a drafter's architecture, as an entry of a list."""
    options = recipe.drafters[name]
    layers = options.feature_layers_of(recipe.num_layers)
    text = ARCHITECTURES[name].format(options=options, layers=layers, coverage=figures.get("coverage", 1.0))
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _trained_lines(name: str, recipe: Recipe, figures: dict) -> Iterator[str]:
    """Describe the windows of a drafter's training, and how its corpus differs from the manifest's."""
    options = recipe.drafters[name]
    text = f"`{name}/`: {options.num_windows} windows of {options.window} tokens a step, {options.num_drafts} drafts"
    if KINDS[name].is_parallel:
        text += f" after each of {options.num_roots} roots"
    if options.text_share:
        text += f", {options.text_share:.0%} of the windows from the corpus itself"
    corpus = figures.get("corpus", {})
    if corpus.get("differences"):
        text += ". The corpus differed from `manifest.json`: " + "; ".join(corpus["differences"])
    yield textwrap.fill(text + ".", 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _model_rows(figures: dict, drafters: list[str]) -> list[str]:
    headings = ("folder", "parameters", "training steps", f"seconds on {figures['device']}", "accept length", "no loop")
    rows = []
    for name in ("target", *drafters):
        row = figures[name]
        chains = [chain for chain in row.get("acceptance", ()) if _is_short_and_greedy(chain)]
        lengths = [f"{chain['accept_length']:.2f}" for chain in chains] or ["", ""]
        rows.append((f"`{name}/`", f"{row['parameters']:,}", f"{row['steps']:,}", f"{row['seconds']:.0f}", *lengths))
    return markdown(headings, rows)


def _is_short_and_greedy(row: dict) -> bool:
    return row["temperature"] == 0 and len(row["accepted_by_position"]) == 3


def _measured(study: dict) -> str:
    """Write the tables of the results of `specsim accept`, and of the pair's targets."""
    size = f"{study['num_prompts']} held-out prompts, {study['max_new_tokens']} new tokens each"
    headings = ("setting", "T", "prompts", "accept length", "no loop", "accept rate", "accepted by position")
    checks = [
        (check["claim"], f"{check['measured']:.6g}", check["target"], "yes" if check["reached"] else "**no**")
        for check in study["checks"]
    ]
    lines = [
        f"`specsim accept`: the reference engine on {size};",
        f"{study['num_fresh']} continuations do not loop. Accept length: mean tokens a round, bonus included. Accept",
        "rate: accepted drafts over the proposed depth.",
        *(_edits_lines(study) if study.get("num_edits") else ()),
        "",
        *markdown(headings, map(_measurement_cells, study["measurements"])),
        "",
        *markdown(("figure of the pair", "measured", "target", "reached"), checks),
    ]
    return "\n".join(lines)


def _edits_lines(study: dict) -> Iterator[str]:
    yield f"Drafters without weights also ran on the {study['num_edits']} edits of `edits.jsonl`, an excerpt and part"
    yield f"of its copy with one identifier renamed; {study['num_fresh_edits']} continuations do not loop. Suffix"
    yield "drafts use finished outputs of the batch, so their figures depend on the other prompts."


def _measurement_cells(row: dict) -> tuple[str, ...]:
    setting, everything = row["setting"], row["everything"]
    config = setting["config"]
    tree = "tree {topk}/{num_steps}/{num_draft_tokens}" if config["topk"] > 1 else "chain of {num_steps}"
    rates = ", ".join(f"{rate:.2f}" for rate in everything["accepted_by_position"])
    lengths = (f"{group['accept_length']:.3f}" for group in (everything, row["fresh"]))
    named = (f"{setting['drafter']}, {tree.format(**config)}", f"{setting['temperature']:g}", prompts_of(setting))
    return *named, *lengths, f"{everything['accept_rate']:.2f}", rates


def _licence_rows(distributions: list[dict]) -> Iterator[tuple[str, ...]]:
    groups = defaultdict(list)
    for distribution in distributions:
        groups[distribution["licence"]].append(distribution)
    for licence, members in sorted(groups.items()):
        names = ", ".join(member["name"] for member in members)
        yield licence, f"{sum(member['bytes'] for member in members):,}", names


def _acceptance_rows(figures: dict, drafters: list[str]) -> Iterator[tuple[Any, ...]]:
    for name in drafters:
        for row in figures[name]["acceptance"]:
            rates = ", ".join(f"{rate:.2f}" for rate in row["accepted_by_position"])
            length = f"{row['accept_length']:.2f}"
            yield name, row["temperature"], len(row["accepted_by_position"]), row["prompts"], length, rates
