"""specsim parity: the first tensor in which an engine's drafter differs, and the wrong reading that would fit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from specsim.cli.option_fields import common
from specsim.cli.options import DraftFieldOptions, JsonOptions, report
from specsim.core.errors import InputError, require
from specsim.core.kinds import DEFAULT

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from specsim.core.pair import Pair
    from specsim.correctness.parity import Parity, PrefillScene

_MOST_FITS = 5  # in the printout
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ParityOptions(DraftFieldOptions, JsonOptions):
    """Options of specsim parity."""

    # Tensors of one prompt that the engine dumped: a file or a folder of safetensors, or of SGLang's dumpers.
    engine: Annotated[Path | None, common("Tensors", values="PATH", default="none, with --dump", file="reads")] = None
    # JSON object from the engine's names to those of this command; * is a number.
    map: Annotated[Path | None, common("Tensors", default="the names are known", file="reads")] = None
    # Data type of the engine's arithmetic.
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"] | None,
        common("Tensors", default="that of the tensors, float32 with --dump"),
    ] = None
    # Write the reference's tensors to this safetensors file, to see their names.
    dump: Annotated[Path | None, common("Output", file="writes")] = None
    # Prompt of --dump.
    text: Annotated[str, common("Tensors")] = "def add(first, second):"
    # Target: a folder or a hub id.
    target: Annotated[str | None, common("Model", default="the shipped target, tiny", file="reads")] = None
    # Drafter's weights: a folder or a hub id.
    draft: Annotated[str | None, common("Model", default="the shipped drafter", file="reads")] = None
    # Kind of the drafter.
    drafter: Annotated[str | None, common("Model", default=f"{DEFAULT}, or the kind of --draft")] = None


def parity(options: ParityOptions) -> None:
    """Name the tensor in which an engine's drafter goes wrong.

    It compares the engine's tensors with the reference in the order of computation. For the first that rounding does
    not explain, it tries wrong readings of the checkpoint, and lists those that make it equal.

    Exit status: 0 if rounding explains every difference, 1 if not, 2 for bad input and if no tensor can be compared.

    Examples:
      specsim parity --dump names.safetensors
      specsim parity --engine dump --target target --draft head --dtype bfloat16
    """
    from specsim.models.load import load

    is_one = (options.engine is None) != (options.dump is None)
    require(is_one, "engine", options.engine and str(options.engine), "a path, or none with --dump")
    pair = load(options.target, options.draft, options.drafter, options.draft_fields() or None)
    if options.dump is not None:
        _dump(options.dump, pair, options.text, options.dtype or "float32")
        return
    assert options.engine is not None
    _compare(options, options.engine, pair)


def _dump(file: Path, pair: "Pair", text: str, dtype: str) -> None:
    import torch

    from specsim.correctness.parity import PrefillScene, Tokens, write_dump

    require(pair.tokenizer is not None, "target", pair.name, "a target with a tokenizer")
    tokens = Tokens(tuple(pair.tokenizer.encode(text)))
    require(len(tokens.ids) > 0, "text", text, "a text of at least one token")
    scene = PrefillScene(pair, tokens, getattr(torch, dtype))
    tensors = scene.trace()
    write_dump(tensors, tokens, scene.next_token, file)
    print(f"{file}: {len(tensors)} tensors of {len(tokens.ids)} rows in {dtype}, and token_ids and next_token")


def _compare(options: ParityOptions, path: Path, pair: "Pair") -> None:
    import torch

    from specsim.correctness.parity import compare, read_dump, select, tokens_of
    from specsim.correctness.parity.comparison import wider

    read = read_dump(path, options.map)
    tokens = tokens_of(read)
    dtype = getattr(torch, options.dtype or _dtype_of(read))
    exact = _scene(pair, tokens, wider(dtype))
    rounded = _scene(pair, tokens._replace(next_id=exact.next_token), dtype)
    tensors = select(read, exact.trace(), pair.target.config.vocab_size)
    unknown = sorted(set(read) - {"token_ids", "next_token"} - set(tensors) - {n.partition("/")[2] for n in tensors})
    require(tensors, "engine", str(path), "tensors with names that `specsim parity --dump FILE` shows, or --map")
    result = compare(tensors, exact, rounded)
    value = {"engine": str(path), "dtype": str(dtype).removeprefix("torch."), "not_compared": unknown} | asdict(result)
    report("parity", lambda console: _show(console, result, unknown), value, options.json, result.is_ok)


def _scene(pair: "Pair", tokens: "object", dtype: "torch.dtype") -> "PrefillScene":
    from specsim.correctness.parity import PrefillScene

    return PrefillScene(pair, tokens, dtype)  # pyright: ignore[reportArgumentType]


def _dtype_of(tensors: Mapping[str, "torch.Tensor"]) -> str:
    """Take the narrowest type of the tensors."""
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    dtypes = [name for name in reversed(_FLOATS) if name in names]
    if not dtypes:
        raise InputError("engine", "a dump without numbers of " + ", ".join(_FLOATS), "one with a tensor of the model")
    return dtypes[0]


def _show(console: "Console", result: "Parity", unknown: list[str]) -> None:
    from specsim.core.display import heading, paragraph, print_table

    equal = [entry for entry in result.compared if entry.is_equal]
    heading(console, f"{len(equal)} tensors equal within rounding" + (f", up to {equal[-1].name}" if equal else ""))
    if unknown:
        paragraph(console, f"not compared, unknown names: {', '.join(unknown)}")
    if result.tie is not None:
        paragraph(console, f"{result.tie}: a near-tie, after which other tokens are drafted; nothing later is compared")
    first = result.first
    if first is None:
        return
    paragraph(console, f"first difference: {first.name}")
    says = f"its shape is {first.shapes}" if first.shapes else (
        f"{first.rows_that_differ} of {first.rows} rows differ, from row {first.first_row}, by {first.difference:.3g} "
        f"at most; rounding explains {first.budget:.3g}"
    )  # fmt: skip
    paragraph(console, says)
    if result.between:
        paragraph(console, f"not dumped before it: {', '.join(result.between)}")
    best = [fit for fit in result.fits if fit.next_difference == result.fits[0].next_difference]
    rows = [(fit.reading, fit.next_difference or "none") for fit in best[:_MOST_FITS]]
    if rows:
        print_table(console, ("reading that fits", "next difference"), rows)
    else:
        paragraph(console, f"none of {result.num_readings} wrong readings makes it equal")
