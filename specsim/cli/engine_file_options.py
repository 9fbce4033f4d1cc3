"""Options of plan for files that engines, or the adaptive policy of this one, read."""

from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.file_options import writes
from specsim.cli.options import option
from specsim.core.errors import InputError
from specsim.core.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.plan import Plan

_FILE = "Write the best chain by batch size as"


@dataclass(frozen=True, slots=True)
class EngineFileGroup:
    """Files with the schedule by batch size that engines read, and that of the goodput policy."""

    sglang_file: Annotated[
        Path | None,
        option(
            "Output",
            f"{_FILE} SGLang's --speculative-adaptive-config.",
            metavar="FILE",
            show_default=False,
            callback=writes,
        ),
    ] = None
    vllm_file: Annotated[
        Path | None,
        option(
            "Output",
            f"{_FILE} the value of vLLM's --speculative-config.",
            metavar="FILE",
            show_default=False,
            callback=writes,
        ),
    ] = None
    tensorrt_llm_file: Annotated[
        Path | None,
        option(
            "Output",
            f"{_FILE} TensorRT-LLM's --config: YAML or JSON.",
            metavar="FILE",
            show_default=False,
            callback=writes,
        ),
    ] = None

    goodput_file: Annotated[
        Path | None,
        option(
            "Output",
            "Write the cost of rounds by batch size as a policy for specsim's --adaptive.",
            metavar="FILE.json",
            show_default=False,
            callback=writes,
        ),
    ] = None

    def check(self) -> None:
        """Refuse a policy's file by a name that --adaptive does not take for a file."""
        if self.goodput_file is not None and self.goodput_file.suffix != ".json":
            raise InputError("goodput_file", str(self.goodput_file), "a name that ends in .json")

    def usage(self, found: "Plan", draft: str) -> list[str]:
        """List the options that give the files to the engines."""
        return [_usage(name, path, found, draft) for name, path in self._paths().items()]

    def contents(self, found: "Plan", draft: str) -> dict[str, bytes]:
        """Make the content of each file, by its option; InputError where a plan has none."""
        from specsim.simulator.engine_files import text

        return {name: text(_value(name, found, draft), path).encode() for name, path in self._paths().items()}

    def write(self, contents: dict[str, bytes]) -> None:
        """Write the files."""
        with ExitStack() as after:  # no file that fails costs the others
            for name, path in self._paths().items():
                after.callback(write_whole, path, contents[name], name)

    def _paths(self) -> dict[str, Path]:
        paths = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: path for name, path in paths.items() if path is not None}


def _value(name: str, found: "Plan", draft: str) -> dict[str, Any]:
    """Make the value of a file."""
    from specsim.simulator.engine_files import FILES, goodput_file

    if name == "goodput_file":
        return goodput_file(found)
    return FILES[name.removesuffix("_file")](found.chains, found.cell.drafter, draft)


def _usage(name: str, path: Path, found: "Plan", draft: str) -> str:
    """Write the options by which an engine reads its file."""
    from specsim.simulator.candidates import sglang_flags

    if name == "sglang_file":
        first = max(found.chains, key=lambda each: (each.config.num_steps > 0, -each.low)).config
        flags = sglang_flags(found.cell, first, draft) or ""
        return f"SGLang: {flags} --speculative-adaptive --speculative-adaptive-config {path}"
    if name == "goodput_file":
        return f"specsim: {_tree_options(found)} --adaptive {path}"
    if name == "vllm_file":
        return f'vLLM: --speculative-config "$(cat {path})"'
    first = found.chains[0].config.num_steps
    fewer = any(each.config.num_steps > first for each in found.chains)
    note = f" (it takes the most drafts at batch size 1: {first} at most, fewer than planned)" if fewer else ""
    return f"TensorRT-LLM: trtllm-serve --config {path}{note}"


def _tree_options(found: "Plan") -> str:
    """Write the options of the goodput policy's setting of most steps."""
    from specsim.simulator.engine_files import deepest

    config = deepest(found)
    size = "" if config.topk == 1 else f" --num-draft-tokens {config.num_draft_tokens}"
    return f"--topk {config.topk} --num-steps {config.num_steps}{size}"


def show_chains(found: "Plan", console: "Console") -> None:
    """Print the schedule of chains by batch size."""
    from specsim.core.display import paragraph, short_setting

    ranges = [f"{_span(each.low, each.high)}: {short_setting(each.config)}" for each in found.chains]
    console.print()
    paragraph(console, f"Best chain by batch size, for engines that switch: {'; '.join(ranges)}.")


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
