"""A first look: one round in detail, whole continuations, and both implementations side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from textwrap import indent
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import by_position, figure, heading, paragraph, print_table
from specsim.core.errors import InputError
from specsim.core.metrics import is_loop
from specsim.core.phases import Batch, PrefillInput, VerifyInput, VerifyOutput
from specsim.correctness.differential import Cell, check
from specsim.serving.generation import generate, load_engine
from specsim.serving.outputs import Generation

PLAIN = SpecConfig.plain()
CHAIN = SpecConfig(topk=1, num_draft_tokens=4)
TREE = SpecConfig()
NAMES = {PLAIN: "plain", CHAIN: "chain of 3", TREE: "tree 4/3/8"}
ROUNDS_TO_CHOOSE_FROM = 12
# Of the comparison of both implementations.
COMPARED_ROUNDS = 3
COMPARED_PROMPT = 32  # last tokens of each prompt
COMPARED_TOKENS = 10
PROMPT_LINES = 6
NO_GPU = "(on Triton's interpreter: there is no GPU) "
NEXT = """\
specsim generate --prompt "def main():"    continue a text of your own
specsim generate --help-all                trees, drafters, sampling, penalties, page sizes
specsim diff --grid quick                  both implementations compared under more settings
specsim accept                             acceptance over all shipped prompts (minutes)
reference/engine.py                        the round as code: draft, verify, draft_extend
reference/tree.py, fast/tree/construction.py            the layout of a tree, in PyTorch and in Triton
notebooks/guide/getting-started.md         the guide; make docs builds it as a site"""


@dataclass(frozen=True, slots=True)
class DemoRound:
    """One round of one request."""

    number: int
    seq_len: int
    tree: VerifyInput  # proposed by the drafter
    output: VerifyOutput  # of the target

    @property
    def path(self) -> list[int]:
        """Accepted nodes, root first."""
        return self.output.verdict.accept_index[0, : int(self.output.verdict.num_accepted_tokens)].tolist()

    @property
    def needs_the_tree(self) -> bool:
        """Whether the accepted path leaves the drafter's first choices, where a chain would have stopped."""
        first_child = self.tree.retrieve_next_token[0].tolist()
        return any(first_child[parent] != node for parent, node in pairwise(self.path))


def run(pair: Any, prompts: Sequence[str], console: Console, max_new_tokens: int = 48) -> bool:
    """Show everything on the console; False if an output differs from plain decoding's, or fast from the reference."""
    _introduce(pair, console)
    generations = _generate_all(pair, prompts, max_new_tokens)
    plain = generations[PLAIN, 0.0]
    chosen = next((i for i, output in enumerate(plain.outputs) if not is_loop(output.token_ids)), 0)
    _show_text(prompts[chosen], plain.outputs[chosen].text, console)
    with torch.inference_mode():
        first = list(islice(rounds(pair, pair.tokenizer.encode(prompts[chosen])), ROUNDS_TO_CHOOSE_FROM))
    example = max(
        first, key=lambda candidate: (candidate.needs_the_tree and len(candidate.path) > 2, len(candidate.path))
    )
    _show_round(example, pair.tokenizer, console)
    _show_rounds_of(chosen, generations, console)
    equal = _show_equality(generations, console)
    _show_figures(generations, console)
    equal = _show_implementations(pair, prompts[:2], console) and equal
    heading(console, "Next")
    console.print(NEXT)
    return equal


def _introduce(pair: Any, console: Console) -> None:
    console.print(Text("EAGLE tree speculation on a trained pair", style="bold"))
    paragraph(
        console,
        "A small drafter proposes a tree of tokens; the target checks the whole tree in one forward pass and "
        "keeps the path that it would have generated itself, plus one more token, the bonus.",
    )
    console.print()
    console.print(f"target   {_summary(pair.target, pair.target.config)}")
    console.print(f"drafter  {pair.drafter.config.kind}, {_summary(pair.drafter, pair.drafter.config.model)}")


def _summary(checkpoint: Any, shape: Any) -> str:
    tensors = {id(tensor): tensor for tensor in checkpoint.tensors.values() if tensor.is_floating_point()}
    size = sum(tensor.numel() for tensor in tensors.values()) / 1e6
    return f"{shape.family}, layers {shape.num_layers}, hidden {shape.hidden_size}, {size:.1f} M parameters"


def _generate_all(pair: Any, prompts: Sequence[str], max_new_tokens: int) -> dict[tuple[SpecConfig, float], Generation]:
    """Run every setting at temperature 0, and the speculative ones at temperature 1."""
    settings = [(PLAIN, 0.0), (CHAIN, 0.0), (TREE, 0.0), (CHAIN, 1.0), (TREE, 1.0)]
    generations = {}
    for config, temperature in tqdm(settings, desc="continuing the prompts", unit="run", leave=False, disable=None):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True)
        generations[config, temperature] = generate(pair, prompts, config, sampling)
    return generations


def rounds(pair: Any, prompt_ids: Sequence[int]) -> Iterator[DemoRound]:
    """Run rounds of one greedy request, phase by phase."""
    engine = load_engine(pair, TREE)
    max_len = engine.config.length_limit
    pools = engine.make_pools(1, engine.config.reserved_columns(max_len))
    row = pools.open()
    pools.reserve(row, len(prompt_ids))
    batch = Batch.of([0], [row], [len(prompt_ids)], [SamplingParams()], engine.target.config.vocab_size)
    draft_input = engine.prefill(batch, PrefillInput.of_prompts([prompt_ids]), pools).draft_input
    for number in range(1, max_len - len(prompt_ids)):
        tree = engine.draft(batch, draft_input, pools)
        output = engine.verify(batch, tree, pools)
        yield DemoRound(number, int(batch.seq_lens), tree, output)
        draft_input = engine.draft_extend(batch, output.draft_extend_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)


def _show_text(prompt: str, text: str, console: Console) -> None:
    lines = prompt.splitlines()[-PROMPT_LINES:]
    heading(console, f"A prompt from a file held out of training (its last {len(lines)} lines)")
    console.print(Text(indent("\n".join(lines), "    "), style="dim"))
    heading(console, "Its greedy continuation")
    console.print(Text(indent(text, "    ")))


def _show_round(example: DemoRound, tokenizer: Any, console: Console) -> None:
    heading(console, f"Round {example.number} of it: a tree of {TREE.num_draft_tokens} tokens")
    paragraph(
        console,
        f"At each of {TREE.num_steps} steps the drafter keeps its {TREE.topk} best continuations. Of all that it saw, "
        f"the {TREE.num_draft_tokens - 1} best "
        "hang below the root, the last token so far. Score: product of the drafter's probabilities.",
    )
    console.print()
    print_table(console, ("node", "token", "score", "the target says"), list(_tree_rows(example, tokenizer)))
    drafts = int(example.output.verdict.num_accepted_drafts)
    tokens = int(example.output.verdict.num_accepted_tokens)
    before = example.seq_len
    leaves = " The path leaves the drafter's first choices, where a chain would have stopped." * example.needs_the_tree
    console.print()
    paragraph(
        console,
        f"num_accepted_drafts {drafts}, num_accepted_tokens {tokens} (the bonus included): one pass of the target took "
        f"prompt and text from {before + 1} to {before + 1 + tokens} tokens.{leaves}",
    )


def _tree_rows(example: DemoRound, tokenizer: Any) -> Iterator[tuple[Text, ...]]:
    """Make a row a node, children below their parent."""
    tokens, scores, parents = (
        column[0].tolist() for column in (example.tree.draft_tokens, example.tree.scores, example.tree.parents)
    )
    path = example.path
    predict = example.output.verdict.predict.tolist()

    def rows(node: int, depth: int) -> Iterator[tuple[Text, ...]]:
        says = "" if node not in path else "yes" if node else "the root"
        if node == path[-1]:
            says += f", and goes on with {_quoted(predict[node], tokenizer)}, the bonus"
        cells = (str(node), "  " * depth + _quoted(tokens[node], tokenizer), f"{scores[node]:.3f}", says)
        yield tuple(Text(cell, style="bold green" if node in path else "") for cell in cells)
        for child in (child for child, parent in enumerate(parents) if parent == node):
            yield from rows(child, depth + 1)

    return rows(0, 0)


def _quoted(token: int, tokenizer: Any) -> str:
    return repr(tokenizer.decode([token]))


def _show_rounds_of(chosen: int, generations: dict[tuple[SpecConfig, float], Generation], console: Console) -> None:
    heading(console, "The same continuation in three settings")
    counts = {config: generations[config, 0.0].outputs[chosen] for config in NAMES}
    columns = ("setting", "tokens", "target passes", "tokens of each round")
    print_table(console, columns, [_count_cells(NAMES[config], output) for config, output in counts.items()])


def _count_cells(name: str, output: Any) -> tuple[str, ...]:
    gained = output.num_accepted_tokens_per_round
    per_round = f"{gained[0]} in every round" if len(set(gained)) == 1 else " ".join(map(str, gained))
    return name, str(len(output.token_ids)), str(len(gained) + 1), per_round


def _show_equality(generations: dict[tuple[SpecConfig, float], Generation], console: Console) -> bool:
    """Compare token ids, all prompts."""
    plain = [output.token_ids for output in generations[PLAIN, 0.0].outputs]
    num_tokens = sum(map(len, plain))
    equal = True
    console.print()
    for config in (CHAIN, TREE):
        same = [output.token_ids for output in generations[config, 0.0].outputs] == plain
        claim = f"{NAMES[config]}: the {num_tokens} tokens of {len(plain)} prompts equal plain decoding's: "
        console.print(Text(claim + ("yes" if same else "NO"), style="bold green" if same else "bold red"))
        equal = equal and same
    return equal


def _show_figures(generations: dict[tuple[SpecConfig, float], Generation], console: Console) -> None:
    heading(console, "Acceptance on these prompts (T: temperature)")
    columns = ("setting", "T", "tokens", "rounds", "accept length", "rounds with at least 1, 2, 3 drafts accepted")
    print_table(console, columns, [_figure_cells(*item) for item in generations.items()])
    console.print("\nAccept length: mean tokens a round, bonus included. A tree is named by topk, steps, draft tokens.")


def _figure_cells(setting: tuple[SpecConfig, float], generation: Generation) -> tuple[str, ...]:
    config, temperature = setting
    metrics = generation.metrics
    counts = (str(metrics["tokens"]), str(metrics["rounds"]), figure(metrics["accept_length"]))
    return NAMES[config], f"{temperature:g}", *counts, by_position(metrics["accepted_by_position"])


def compared_cell(pair: Any, prompts: Sequence[str]) -> Cell:
    """Make the cell of a greedy and a sampled request on one graph a round."""
    ids = tuple(tuple(pair.tokenizer.encode(prompt)[-COMPARED_PROMPT:]) for prompt in prompts)
    sampling = tuple(
        SamplingParams(temperature=float(index), max_new_tokens=COMPARED_TOKENS) for index in range(len(ids))
    )
    return Cell("demo", "of the demo", ids, sampling, TREE, mode="free", graph="round", rounds=COMPARED_ROUNDS)


def _show_implementations(pair: Any, prompts: Sequence[str], console: Console) -> bool:
    """Compare the implementations on a greedy and a sampled request."""
    heading(console, "The same rounds in Triton kernels")
    try:
        result = check(compared_cell(pair, prompts), pair=pair)
    except InputError as error:
        console.print(f"Only the reference ran: {error}")
        return True
    paragraph(
        console,
        f"One graph per round, replayed for a greedy and a sampled request {NO_GPU * (not torch.cuda.is_available())}"
        "and compared with the reference: trees, logits, accepted paths, tokens, logprobs and every KV slot. A float64 "
        "run shows which differences rounding explains.",
    )
    console.print()
    counts = (result.coverage.get("rounds", 0), result.decisions, result.within_rounding_error, result.mismatches)
    columns = ("requests x rounds", "decisions", "within rounding error", "mismatches", "largest logprob error")
    print_table(console, columns, [(*map(str, counts), f"{result.max_logprob_error:.0e}")])
    same = not result.mismatches
    verdict = "equal" if same else f"NOT equal; {result.first_divergence}"
    console.print()
    console.print(Text(f"The implementations are {verdict}.", style="bold green" if same else "bold red"))
    return same
