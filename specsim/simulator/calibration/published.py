"""Tables of the package as measured cells, the six cells that a calibration may see, and fits of several tables."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.calibration.observation import PRIORS, Observation, Prior
from specsim.simulator.calibration.posterior import SHARES, Posterior
from specsim.simulator.calibration.profile import ServerStructure
from specsim.simulator.calibration.structure import STRUCTURES, Calibrated, calibrate
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import Drafter, drafter
from specsim.simulator.hardware import hardware
from specsim.simulator.model import model
from specsim.simulator.reproduce import fast_rounds, served, spec_bench, vllm_20780
from specsim.simulator.reproduce.reproduction import rows

CELLS = 6  # that a calibration sees


@dataclass(frozen=True, eq=False)
class PublishedTable:
    """A published table, or the part of one that a single server gave."""

    name: str
    engine: str  # name of the profile that includes it
    costs: Mapping[str, CostModel]
    cells: Sequence[Observation]
    structures: Sequence[ServerStructure] = STRUCTURES  # that the server may have
    shares_of: str = ""  # engine whose tables, on the same GPU, give the shares of its peaks (calibration.shares)
    note: str = ""  # what the table does not say, and is assumed
    others: int = 0  # cells of the same table that other servers gave

    @property
    def published_cells(self) -> int:
        return len(self.cells) + self.others

    @property
    def seen(self) -> tuple[int, ...]:
        """Cells that a calibration sees, by their settings alone: fewest and most draft tokens at three batch sizes.

        The batch sizes are the smallest, the largest, and the one nearest to their geometric mean. Of equal settings
        the first listed ones count. Missing cells are spread evenly over the list of the others.
        """
        sizes = sorted({cell.batch for cell in self.cells})
        middle = np.sqrt(sizes[0] * sizes[-1])
        near = min(sizes, key=lambda size: abs(np.log(size / middle)))
        chosen: list[int] = []
        for size in dict.fromkeys((sizes[0], near, sizes[-1])):
            at = [index for index, cell in enumerate(self.cells) if cell.batch == size]
            nodes = {index: self.cells[index].config.num_draft_tokens for index in at}
            fewest = min(at, key=lambda index: nodes[index])
            most = max((index for index in at if index != fewest), key=lambda index: nodes[index], default=fewest)
            chosen += dict.fromkeys((fewest, most))
        others = [index for index in range(len(self.cells)) if index not in chosen]
        missing = min(CELLS, len(self.cells)) - len(chosen)
        chosen += [others[at] for at in np.linspace(0, len(others) - 1, missing).round().astype(int)]
        return tuple(sorted(chosen))


def chain(num_steps: int) -> SpecConfig:
    """Make the setting of a chain; 0 steps are plain decoding."""
    return SpecConfig(1, num_steps, num_steps + 1) if num_steps else SpecConfig.plain()


def _vllm_41162(name: str) -> PublishedTable:
    pair = served.PAIRS[name]
    target = model(pair.model)
    cost = CostModel(hardware(served.GPU), target, drafter(pair.drafter, target, pair.draft_vocab))
    cells = []
    for cell in served.read():
        for side, run in cell.runs.items() if cell.model == name else ():
            figures = {
                "tokens_per_s": run["Output Throughput (tok/s)"],
                "tpot_s": run["Mean TPOT (ms)"] * 1e-3,
                "ttft_s": run["Mean TTFT (ms)"] * 1e-3,
            }
            observation = Observation(
                f"{cell.label}, {side}",
                served.CONFIG,
                cell.clients,
                min(run["Spec Decode Accept Length"], served.CONFIG.num_steps + 1),
                round(cell.prompt_tokens),
                round(cell.output_tokens),
                figures,
                filters=pair.filters and cell.temperature > 0,
                source=name,
            )
            cells.append(observation)
    kind = "dense" if name.endswith("8B") else "experts"
    shares_of = "vllm-2026-dense" if kind == "experts" else ""
    return PublishedTable(f"vllm_41162, {name}", f"vllm-2026-{kind}", {name: cost}, cells, shares_of=shares_of)


def _vllm_20780(method: str) -> PublishedTable:
    target = model("llama-3.1-8b")
    head = {"eagle1": drafter("eagle", target), "eagle3": drafter("eagle3", target, vllm_20780.DRAFT_VOCAB)}[method]
    cost = CostModel(hardware("H100-SXM"), target, head)
    context = int(vllm_20780.CONTEXT[0])
    cells = [
        Observation(
            f"{row['method']}, K {row['num_drafts']}",
            chain(int(row["num_drafts"])),
            1,
            float(row["accept_length"]),
            context,
            1,
            {"decode_tokens_per_s": 1e3 / float(row["tpot_ms"])},
            source=method,
        )
        for row in rows("vllm_20780")
        if row["method"] in (method, "none")
    ]
    return PublishedTable(f"vllm_20780, {method}", "vllm-2025-dense", {method: cost}, cells)


def _fast_rounds() -> PublishedTable:
    value = json.loads(fast_rounds.kept_file().read_bytes())
    cells = []
    for row in value["rows"]:
        if row["name"] == "growth" and "ours" in row["timings"]:
            requests, length, tree = (row["setting"][name] for name in ("requests", "L", "tree"))
            seconds = {"round_s": row["timings"]["ours"]["median_us"] * 1e-6}
            config = fast_rounds.TREES[tree]
            cells.append(
                Observation(f"{tree}, {requests} requests, L {length}", config, requests, 1.0, length, 1, seconds)
            )
    cost = fast_rounds.cost_of(value)
    return PublishedTable("fast_rounds", "specsim-fast", {"": cost}, cells, (ServerStructure(),))


def _spec_bench(gpu: str) -> PublishedTable:
    """Select the methods whose round is a setting: drafts of a model, of EAGLE's head, or looked up."""
    costs = {}
    cells = []
    for row in rows("spec_bench"):
        setting = spec_bench.round_of(row)
        if row["gpu"] != gpu or setting is None:
            continue
        config, head = setting
        source = f"{row['model']}, {row['method']}"
        target = model(f"vicuna-{row['model'].removeprefix('Vicuna-').lower()}-v1.3")
        drafting_model = Drafter(model("vicuna-68m"), is_feature=False) if head == "vicuna-68m" else None
        drafting_model = drafter(head, target) if head == "eagle" else drafting_model
        costs[source] = CostModel(hardware(spec_bench.GPUS[gpu]), target, drafting_model, dtype="float16")
        length = float(row["mean_accepted_tokens"])
        context = int(spec_bench.CONTEXT[0])
        figures = {"speedup": float(row["speedup"])}
        cells.append(Observation(f"{source}, {gpu}", config, 1, length, context, 1, figures, source=source))
    return PublishedTable(f"spec_bench, {gpu}", "transformers-dense", costs, cells, (ServerStructure("sync", "none"),))


def _sglang_22246() -> PublishedTable:
    target = model("qwen3-235b-a22b")
    cost = CostModel(hardware("H20"), target, drafter("eagle3", target, 32000), tensor_parallel=8)
    cells = [
        Observation(
            f"{row['num_steps']} steps, batch {row['batch']}",
            chain(int(row["num_steps"])),
            int(row["batch"]),
            None,
            1000,
            1000,
            {"decode_tokens_per_s": float(row["tokens_per_s"])},
        )
        for row in rows("sglang_22246")
    ]
    note = (
        "Neither GPUs nor accept lengths are stated: eight H20 are assumed (on H100 the fit takes 7 % of the "
        "arithmetic), and two parameters of acceptance are fitted with the others. Contexts of 1500 tokens are assumed."
    )
    return PublishedTable("sglang_22246", "sglang-2026-experts", {"": cost}, cells, note=note)


def _angelslim_163() -> PublishedTable:
    target = model("qwen3-30b-a3b")
    cost = CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000), tensor_parallel=4)
    cells = []
    for row in rows("angelslim_163"):
        steps = int(row["num_steps"])
        config = SpecConfig(int(row["topk"]), steps, int(row["num_draft_tokens"])) if steps else chain(0)
        label = f"{row['topk'] or 0}/{steps}/{row['num_draft_tokens'] or 1}, batch {row['batch']}"
        figures = {"decode_tokens_per_s": float(row["tokens_per_s"])}
        length = float(row["accept_length"])
        cells.append(Observation(label, config, int(row["batch"]), length, 100, 1000, figures))
    note = (
        "Contexts of 600 tokens are assumed. The number of prompts is not stated: batches of 32 and 64 may not be full."
    )
    return PublishedTable("angelslim_163", "sglang-2025-experts", {"": cost}, cells, note=note)


def tables() -> list[PublishedTable]:
    """Read every table of the package that has measured times of servers."""
    parts = [_vllm_41162(name) for name in served.PAIRS]
    parts += [_vllm_20780(method) for method in vllm_20780.METHODS]
    parts += [_fast_rounds(), *(_spec_bench(gpu) for gpu in spec_bench.GPUS)]
    parts += [_sglang_22246(), _angelslim_163()]
    total = Counter()
    for part in parts:
        total[part.name.partition(",")[0]] += len(part.cells)
    return [replace(part, others=total[part.name.partition(",")[0]] - len(part.cells)) for part in parts]


def together_with_shares(engine_tables: Sequence[PublishedTable], every: Sequence[PublishedTable]) -> Calibrated:
    """Fit an engine's tables together, with shares of peaks from those of `every` that it names."""
    return together(engine_tables, shared_priors(tables_of_shares(engine_tables, every)))


def tables_of_shares(
    engine_tables: Sequence[PublishedTable], every: Sequence[PublishedTable]
) -> tuple[PublishedTable, ...]:
    """Find the tables of `every` from which an engine's tables take shares of peaks."""
    return tuple(table for table in every if table.engine == engine_tables[0].shares_of)


def shared_priors(share_tables: Sequence[PublishedTable]) -> Mapping[str, Prior]:
    """Fit tables together, and take their shares of peaks as priors; PRIORS without tables."""
    return with_shares(together(share_tables, PRIORS).posterior) if share_tables else PRIORS


def with_shares(posterior: Posterior) -> dict[str, Prior]:
    """Take shares as another fit has found them, with their uncertainty there, as priors."""
    values, deviations = posterior.values, posterior.deviations
    shares = {name: replace(PRIORS[name], value=values[name], spread=deviations[name]) for name in SHARES}
    return {**PRIORS, **shares}


def together(tables: Sequence[PublishedTable], priors: Mapping[str, Prior]) -> Calibrated:
    """Fit tables together, all with the structures of the first."""
    costs = {source: cost for table in tables for source, cost in table.costs.items()}
    cells = [cell for table in tables for cell in table.cells]
    return calibrate(costs, cells, tables[0].structures, priors)
