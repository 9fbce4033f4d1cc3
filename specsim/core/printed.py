"""Short text and tables for values of named tensors, for states and pools: shape, type and content at a glance."""

from collections.abc import Mapping
from html import escape
from typing import Any

import torch

MOST_VALUES = 16  # tensors with more show what they range over
_DTYPES = {
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


def tensor_type(value: torch.Tensor) -> str:
    """Name a tensor's type and shape, and its device unless that is the CPU: `i64 [2, 8]`."""
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))} {list(value.shape)}{device}"


def tensor_content(value: torch.Tensor) -> str:
    """Show the values of a small tensor, the rows of a small matrix, or what a larger one ranges over."""
    if value.is_meta or value.numel() == 0:
        return ""
    value = value.detach().cpu()
    if value.numel() <= MOST_VALUES:
        return _values(value)
    if value.dtype == torch.bool:
        return f"{int(value.sum()):,} of {value.numel():,} true"
    least, most = (float(bound) for bound in (value.min(), value.max()))
    return f"from {least:.4g} to {most:.4g}"


def _values(value: torch.Tensor) -> str:
    if value.dim() > 1:
        return " | ".join(_values(row) for row in value)
    if value.dtype == torch.bool:
        return " ".join("1" if number else "0" for number in value.tolist())
    numbers = value.flatten().tolist()
    return " ".join(f"{number:.4g}" if isinstance(number, float) else str(number) for number in numbers)


def parts_text(title: str, parts: Mapping[str, Any]) -> str:
    """Print named parts below a title: a line for each tensor, nested states indented."""
    width = max(map(len, parts), default=0)
    lines = [title]
    for name, value in parts.items():
        if isinstance(value, torch.Tensor):
            content = f"{tensor_type(value):<14}  {tensor_content(value)}"
        else:
            content = _short(value).replace("\n", "\n  ")
        lines.append(f"  {name:<{width}}  {content}".rstrip())
    return "\n".join(lines)


def parts_html(title: str, parts: Mapping[str, Any]) -> str:
    """Make a table of named parts for a notebook, nested states as tables inside it."""
    rows = []
    for name, value in parts.items():
        if isinstance(value, torch.Tensor):
            cells = f"<td>{escape(tensor_type(value))}</td><td>{escape(tensor_content(value))}</td>"
        else:
            nested = value._repr_html_() if hasattr(value, "_repr_html_") else escape(_short(value))
            cells = f"<td colspan='2' style='text-align:left'>{nested}</td>"
        rows.append(f"<tr><th style='text-align:left'>{escape(name)}</th>{cells}</tr>")
    style = "text-align:left;font-family:monospace"
    return f"<table style='{style}'><caption style='text-align:left'>{escape(title)}</caption>{''.join(rows)}</table>"


def _short(value: Any) -> str:
    """Name each tensor of a tuple by its type; other values show themselves."""
    if isinstance(value, tuple) and value and all(isinstance(member, torch.Tensor) for member in value):
        return ", ".join(tensor_type(member) for member in value)
    return repr(value)
