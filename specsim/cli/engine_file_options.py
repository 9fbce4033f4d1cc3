"""Options of plan for files with the schedule by batch size that engines read."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specsim.cli.options import option
from specsim.core.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.plan import Plan

_FILE = "Write the best chain by batch size as"


@dataclass(frozen=True, slots=True)
class EngineFileGroup:
    """Files with the schedule by batch size that engines read."""

    sglang_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} SGLang's --speculative-adaptive-config.", metavar="FILE", show_default=False),
    ] = None
    vllm_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} the value of vLLM's --speculative-config.", metavar="FILE", show_default=False),
    ] = None
    tensorrt_llm_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} TensorRT-LLM's --config: YAML or JSON.", metavar="FILE", show_default=False),
    ] = None

    @property
    def paths(self) -> dict[str, Path | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def write(self, found: "Plan", draft: str) -> list[str]:
        """Write the files, all or none of them; returns the options that give them to the engines."""
        from specsim.simulator.engine_files import FILES, text

        cell = found.cell
        made = {
            path: text(FILES[name.removesuffix("_file")](found.chains, cell.drafter, draft), path)
            for name, path in self.paths.items()
            if path is not None
        }
        for path, content in made.items():
            write_whole(path, content.encode())
        return [_usage(name, path, found, draft) for name, path in self.paths.items() if path is not None]


def _usage(name: str, path: Path, found: "Plan", draft: str) -> str:
    """Write the options by which an engine reads its file."""
    from specsim.simulator.flags import sglang_flags

    if name == "sglang_file":
        first = max(found.chains, key=lambda each: (each.config.num_steps > 0, -each.low)).config
        flags = sglang_flags(found.cell, first, draft)
        return f"SGLang: {flags} --speculative-adaptive --speculative-adaptive-config {path}"
    if name == "vllm_file":
        return f'vLLM: --speculative-config "$(cat {path})"'
    first = found.chains[0].config.num_steps
    fewer = any(each.config.num_steps > first for each in found.chains)
    note = f" (it takes the most drafts at batch size 1: {first} at most, fewer than planned)" if fewer else ""
    return f"TensorRT-LLM: trtllm-serve --config {path}{note}"


def show_chains(found: "Plan", console: "Console") -> None:
    """Print the schedule of chains by batch size."""
    from specsim.core.display import paragraph, short_setting

    ranges = [f"{_span(each.low, each.high)}: {short_setting(each.config)}" for each in found.chains]
    console.print()
    paragraph(console, f"Best chain by batch size, for engines that switch: {'; '.join(ranges)}.")


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
