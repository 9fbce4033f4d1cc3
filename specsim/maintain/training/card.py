"""Model card of a pair, from its manifest and the figures of its training."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from specsim.core.metrics import LOOP_SHARE
from specsim.maintain.result_tables import markdown, prompts_of
from specsim.maintain.training.parallel import GREEDY_SHARE
from specsim.maintain.training.prompts import RULE
from specsim.maintain.training.recipe import Recipe
from specsim.training.estimate import NEW_TOKENS

CARD = """# The tiny pair: a target and its drafters

A Llama of {figures[target][parameters]:,} parameters that writes Python, and drafters of several architectures for it.
It exists to watch, test and teach speculative decoding on a trained pair without a download; it is no coding assistant.
Accept lengths are the trainer's own estimate: chains of 3 drafts at temperature 0, bonus included.

{models}

- Target: {recipe.num_layers} layers, hidden {recipe.hidden_size}, {recipe.num_heads} query and {recipe.num_kv_heads}
  key-value heads, intermediate {recipe.intermediate_size}, tied embedding, byte-level BPE of {recipe.vocab_size}.
{architectures}
- EAGLE heads were unrolled {recipe.num_unrolled} steps on {recipe.rollout_window} tokens: {recipe.rollout_prompt} of
  corpus text that the target continued, half of the time greedily and half by sampling. Weights are stored in
  bfloat16.
{distilled}
## Corpus and licences

{manifest[train][files]:,} files of Python source ({manifest[train][bytes]:,} bytes, {figures[target][tokens]:,} tokens)
from CPython's library and the installed distributions that declare a permissive licence. Left out are bundled
third-party folders, generated files, files with a copyleft or proprietary notice, and
{manifest[removed][exact_duplicates]} exact duplicates. {manifest[heldout][files]} whole files are held out, and
{manifest[removed][near_duplicates_of_heldout]} files that nearly duplicate one of them were removed. `manifest.json`
lists the distributions with their versions and licences, the hash of the selection and every held-out file.

| licence | bytes | distributions |
|---|---|---|
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

| drafter | T | chain | prompts | accept length | accepted by position |
|---|---|---|---|---|---|
{acceptance}

## Command

    python -m specsim.maintain.training.train --manifest specsim/models/shipped/tiny/manifest.json

`--smoke` trains a toy pair of the same formats on a CPU within a minute. `--slice 300` stops each model after 300
seconds; the same command then continues it, until its time is used up.
"""
ARCHITECTURES = {
    "eagle": """\
- EAGLE: reads the tensor that the target's lm_head reads, borrows that lm_head, has an embedding of its own.""",
    "eagle3": """\
- EAGLE-3: reads the hidden states *entering* layers {recipe.feature_layers}, transformers' `output_hidden_states[i]`;
  its {recipe.draft_vocab_size} draft ids cover {figures[eagle3][coverage]:.1%} of the training tokens.""",
    "p-eagle": """\
- P-EAGLE: an EAGLE-3 head of {recipe.p_eagle_layers} layers, intermediate {recipe.p_eagle_intermediate_size}, on the
  same hidden states; its mask rows read one learned vector in their place; embedding and lm_head are the target's.""",
    "mtp": """\
- MTP: {recipe.num_mtp_modules} modules of one layer each, intermediate {recipe.mtp_intermediate_size};
  each reads the normed output of the one before, the first one what the target's lm_head reads; embedding and
  lm_head are the target's.""",
    "frozen-kv": """\
- Frozen KV: {recipe.frozen_kv_layers} layers of hidden {recipe.frozen_kv_hidden_size} with queries only, which read
  the keys and values of the target's last layer from the last committed position; it has an lm_head of its own.""",
    "dflash": """\
- DFlash: {recipe.block_layers} Qwen3 layers, intermediate {recipe.block_intermediate_size}, over blocks of a root and
  {recipe.parallel_drafts} mask tokens; keys and values of the context are made of the hidden states that EAGLE-3
  reads; embedding and lm_head are the target's.""",
    "dspark": """\
- DSpark: such layers, whose {recipe.parallel_drafts} rows draft the next token, with a bias of rank
  {recipe.markov_rank} by the token before each draft, and a confidence head that reads this token too; its threshold
  is 0, so it ends no block unless one is set.""",
    "standalone": """\
- Standalone: a Llama of {recipe.standalone_layers} layers, hidden {recipe.hidden_size}, tied embedding, with the
  target's tokenizer; training started from the target's embedding and evenly spaced layers.""",
}
UNMEASURED = "`specsim accept` has not been run on this pair yet."


def write_card(recipe: Recipe, folder: Path) -> str:
    """Fill the card of the pair in `folder` from manifest.json, training.json and, if present, acceptance.json."""
    manifest, figures = (json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "training"))
    accepted = folder / "acceptance.json"
    drafters = [name for name in ARCHITECTURES if name in figures]
    return CARD.format(
        recipe=recipe,
        models="\n".join(_model_rows(figures, drafters)),
        architectures="\n".join(ARCHITECTURES[name].format(recipe=recipe, figures=figures) for name in drafters),
        distilled="".join([*_distilled_lines(figures, drafters), *_parallel_lines(recipe, drafters)]),
        manifest=manifest,
        figures=figures,
        licences="\n".join(_licence_rows(manifest["distributions"])),
        prompt_rule=RULE.format(a_distribution=recipe.prompts_a_distribution),
        measured=_measured(json.loads(accepted.read_text())) if accepted.exists() else UNMEASURED,
        new_tokens=NEW_TOKENS,
        loops_below=LOOP_SHARE,
        acceptance="\n".join(row for name in drafters for row in _acceptance_rows(name, figures[name])),
    )


def _model_rows(figures: dict, drafters: list[str]) -> list[str]:
    headings = ("folder", "parameters", "training steps", f"seconds on {figures['device']}", "accept length", "no loop")
    rows = []
    for name in ("target", *drafters):
        own = figures[name]
        chains = [row for row in own.get("acceptance", ()) if _is_short_and_greedy(row)]
        lengths = [f"{row['accept_length']:.2f}" for row in chains] or ["", ""]
        rows.append((f"`{name}/`", f"{own['parameters']:,}", f"{own['steps']:,}", f"{own['seconds']:.0f}", *lengths))
    return markdown(headings, rows)


def _is_short_and_greedy(row: dict) -> bool:
    return row["temperature"] == 0 and len(row["accepted_by_position"]) == 3


def _distilled_lines(figures: dict, drafters: list[str]) -> Iterator[str]:
    """Describe the training of each drafter that was distilled, and how its corpus differs from the manifest's."""
    distilled = [name for name in drafters if "corpus" in figures[name]]
    for name in distilled:
        corpus = figures[name]["corpus"]
        yield f"- `{name}/`: cross-entropy against the target's distribution on {figures[name]['rollouts']:,} such\n"
        yield f"  windows; the corpus was encoded up to {corpus['tokens']:,} tokens ({corpus['files']:,} files).\n"
        if corpus["differences"]:
            yield "  Its selection differs from `manifest.json`: " + "; ".join(corpus["differences"]) + ".\n"
    if distilled:
        yield "- Seconds of these include compilation; those that were trained side by side shared one GPU.\n"


def _parallel_lines(recipe: Recipe, drafters: list[str]) -> Iterator[str]:
    """Describe the batches of the drafters that make all drafts at once."""
    names = [f"`{name}/`" for name in drafters if name in ("p-eagle", "dflash", "dspark")]
    if names:
        yield f"- {', '.join(names)}: {recipe.parallel_roots} tokens of a window were roots, each with 1 to\n"
        yield f"  {recipe.parallel_drafts} drafts; {GREEDY_SHARE:.0%} of these windows were continued greedily.\n"


def _measured(study: dict) -> str:
    """Write the tables of the results of `specsim accept`, and of the pair's targets."""
    size = f"{study['num_prompts']} held-out prompts, {study['max_new_tokens']} new tokens each"
    headings = ("setting", "T", "prompts", "accept length", "no loop", "accept rate", "accepted by position")
    checks = [
        (each["claim"], f"{each['measured']:.6g}", each["target"], "yes" if each["reached"] else "**no**")
        for each in study["checks"]
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
    lengths = (f"{each['accept_length']:.3f}" for each in (everything, row["fresh"]))
    named = (f"{setting['drafter']}, {tree.format(**config)}", f"{setting['temperature']:g}", prompts_of(setting))
    return *named, *lengths, f"{everything['accept_rate']:.2f}", rates


def _licence_rows(distributions: list[dict]) -> Iterator[str]:
    groups = defaultdict(list)
    for distribution in distributions:
        groups[distribution["licence"]].append(distribution)
    for licence, members in sorted(groups.items()):
        names = ", ".join(member["name"] for member in members)
        yield f"| {licence} | {sum(member['bytes'] for member in members):,} | {names} |"


def _acceptance_rows(name: str, figures: dict) -> Iterator[str]:
    for row in figures["acceptance"]:
        rates = ", ".join(f"{rate:.2f}" for rate in row["accepted_by_position"])
        chain = len(row["accepted_by_position"])
        yield f"| {name} | {row['temperature']} | {chain} | {row['prompts']} | {row['accept_length']:.2f} | {rates} |"
