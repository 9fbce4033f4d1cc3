"""The tables of Leviathan et al., arXiv 2211.17192: closed forms, nothing is fitted."""

from specsim.simulator.reproduce.reproduction import AccuracyTarget, Figure, Reproduction, rows
from specsim.simulator.theory import operations, speedup

SOURCE = "https://arxiv.org/abs/2211.17192"
LEAST_AS_PRINTED = 9


def table1() -> Reproduction:
    """Operations and speed-up at a draft cost that is negligible."""
    figures = []
    for row in rows("leviathan_table1"):
        alpha = float(row["alpha"])
        gamma = int(row["gamma"])
        setting = f"α {alpha}, γ {gamma}"
        figures += [
            Figure(setting, "operations", float(row["operations"]), operations(alpha, gamma)),
            Figure(setting, "speed-up", float(row["speedup"]), speedup(alpha, gamma, 0)),
        ]
    same = sum(figure.is_as_printed for figure in figures)
    target = AccuracyTarget("exact as printed", f"{same} of {len(figures)} to two decimals", same == len(figures))
    method = "Closed forms with drafts that cost nothing, in operations and in time. No parameter, no held-out cell."
    return Reproduction("leviathan_table1", SOURCE, method, tuple(figures), targets=(target,))


def table4() -> Reproduction:
    """Expected speed-ups from α, γ and c as printed, against printed and measured ones."""
    expected = []
    measured = []
    for row in rows("leviathan_table4"):
        simulated = speedup(float(row["alpha"]), int(row["gamma"]), float(row["cost_ratio"]))
        setting = f"{row['task']}, {row['draft']} drafter, T {row['temperature']}, γ {row['gamma']}, α {row['alpha']}"
        expected.append(Figure(setting, "expected", float(row["speedup_expected"]), simulated, digits=1))
        measured.append(Figure(setting, "measured", float(row["speedup_measured"]), simulated, digits=1))
    same = sum(figure.is_as_printed for figure in expected)
    reached = f"{same} of {len(expected)} to one decimal, target {LEAST_AS_PRINTED}"
    target = AccuracyTarget("expected as printed", reached, same >= LEAST_AS_PRINTED)
    errors = [abs(figure.error) for figure in measured]
    notes = (
        "α and c are printed in two digits, which is what the other expected figures differ by.",
        f"Against what was measured the formula is {sum(errors) / len(errors):.0%} off on average and "
        f"{max(errors):.0%} at worst: that is its error bar.",
    )
    method = "The closed form at the α, γ and c of the table. No parameter, no held-out cell."
    return Reproduction("leviathan_table4", SOURCE, method, (*expected, *measured), targets=(target,), notes=notes)
