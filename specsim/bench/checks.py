"""Equality checks: exact for integers, within a budget for floats; a failed one names the difference."""

from collections.abc import Mapping

import torch

from specsim.bench.row import Check


def equal(compared: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Check:
    """Compare every tensor bit for bit; error: number of entries that differ."""
    differing = 0
    first = ""
    for name, tensor in expected.items():
        ours = found[name]
        if ours.shape != tensor.shape:
            return Check(compared, float("inf"), 0, f"{name} has shape {tuple(ours.shape)}, not {tuple(tensor.shape)}")
        wrong = (_bits(ours) != _bits(tensor.to(ours.device))).flatten().nonzero()[:, 0]
        differing += len(wrong)
        if len(wrong) and not first:
            place = int(wrong[0])
            first = f"{name}, entry {place}: {ours.flatten()[place].item()}, not {tensor.flatten()[place].item()}"
    return Check(compared, float(differing), 0, first)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize]) if tensor.is_floating_point() else tensor


def within(compared: str, found: torch.Tensor, exact: torch.Tensor, budget: torch.Tensor | float) -> Check:
    """Compare entries with exact ones within a budget; error: the largest error over its budget."""
    if found.shape != exact.shape:
        return Check(compared, float("inf"), 1, f"shape {tuple(found.shape)}, not {tuple(exact.shape)}")
    share = ((found.to(exact.dtype) - exact).abs() / budget).flatten()
    share = torch.where(share.isnan(), torch.inf, share)
    place = int(share.argmax())
    error = float(share[place])
    values = (found.flatten()[place].item(), exact.flatten()[place].item())
    where = f"entry {place} of shape {tuple(found.shape)}: {values[0]:.6g}, exact {values[1]:.6g}"
    return Check(compared, error, 1, "" if error <= 1 else where)


def all_of(compared: str, *checks: Check) -> Check:
    """Combine several checks: the failed one, else the one with the largest error over its limit."""
    worst = max(checks, key=lambda check: (not check.passed, check.error / check.limit if check.limit else check.error))
    difference = "" if worst.passed else f"{worst.compared}: {worst.difference or worst.error}"
    return Check(compared, worst.error, worst.limit, difference)
