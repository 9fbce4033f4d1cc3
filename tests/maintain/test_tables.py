"""Results of GPU runs: refused unless whole and passed, kept, and shown by tables of README and the guide."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specsim.bench.suites import SUITES, Suite
from specsim.core.errors import InputError
from specsim.core.provenance import code_digests
from specsim.correctness.differential import grid, run_grid
from specsim.maintain import results, tables
from specsim.maintain.page import ROOT, filled, regions
from specsim.maintain.result_tables import SUMMARIES, bench_page, figures, grids, performance, proofs
from specsim.maintain.results import PROOFS, stale

KEPT = ROOT / "fast" / "measurements"
REGIONS = (*tables.RESULT_REGIONS, *tables.CODE_REGIONS)
VERSIONS = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "code": code_digests()}
ON_GPU = {"versions": VERSIONS, "date": "2026-11-22T08:31:16+00:00"}
MEASURED = "Measured on one NVIDIA H200, torch 2, triton 3, 2026-11-22 (`fast/measurements/`)."


def kept_results() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")}


@pytest.fixture
def keep(tmp_path):
    """Keep values, each written as a command writes it, in tmp_path/kept."""
    (tmp_path / "kept").mkdir()

    def keep_values(*values: dict) -> Path:
        files = [tmp_path / f"{number}.json" for number in range(len(values))]
        for file, value in zip(files, values, strict=True):
            file.write_text(json.dumps(value))
        *_, path = results.keep(files, tmp_path / "kept")
        return path

    return keep_values


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def is_about(*texts: str):
    """Check that an InputError names a file or a suite, and says all of `texts`."""
    return lambda error: all(text in f"{error.value}; {error.allowed}" for text in texts)


# The repository


def test_pages_show_the_results_that_are_kept():
    """All but a page of fits, which differ in late digits between machines: test_held_out_tables."""
    paths = [path for path in tables.pages() if "papers" not in path.relative_to(ROOT).parts]
    pages = {path.name: path.read_text(encoding="utf-8") for path in paths}
    del pages["engines.md"]  # whose table a run of the engines writes: make engines-table
    assert sorted(name for page in pages.values() for name in regions(page)) == sorted(REGIONS)
    del pages["held-out.md"]
    stale_pages = [
        name for name, page in pages.items() if page != filled(page, lambda region: tables.region(region, KEPT))
    ]
    assert stale_pages == []
    assert (KEPT / "README.md").read_text(encoding="utf-8") == bench_page(KEPT)


def test_the_sampling_page_says_what_the_kept_run_detects():
    found = [each for each in kept_results()["sampling-test-cuda"]["tests"] if not each["is_control"]]
    text = (ROOT / "notebooks" / "guide" / "sampling-tests.md").read_text(encoding="utf-8")
    noticed = [each["detectable_distance"] for each in found]
    assert f"with {found[0]['tokens']:,} tokens per test, it is {min(noticed):.2f} to {max(noticed):.2f}" in " ".join(
        text.split()
    )


def test_the_benchmark_page_says_where_speculation_pays():
    rows = {tuple(row["setting"].values()): row for row in kept_results()["bench-scale"]["rows"]}

    def ratio(requests: int) -> float:
        tree, plain = (rows[requests, 1024, tree]["timings"]["ours"]["median_us"] for tree in ("(4, 3, 8)", "plain"))
        return tree / plain

    first, *others, last = [f"{ratio(requests):.1f} for {requests}" for requests in (1, 16, 64, 256)]
    text = (ROOT / "notebooks" / "guide" / "gpu-benchmarks.md").read_text(encoding="utf-8")
    assert f"pays: {first} request, {', '.join(others)} and {last}." in " ".join(text.split())


def test_every_grid_is_kept_whole_and_equal():
    kept_grids = [each for name, each in kept_results().items() if name.startswith("diff-")]
    names = ("pairwise", "full", "drafters")
    expected = {(grid, dtype, "cuda") for grid in names for dtype in ("float32", "bfloat16")}
    assert {(each["grid"], each["dtype"], each["device"]) for each in kept_grids} == expected
    assert all(each["cells"] == each["num_cells"] and each["mismatches"] == 0 for each in kept_grids)


def test_every_other_proof_that_is_kept_holds():
    kept = kept_results()
    assert all(kept[f"{name}-cuda"]["is_ok"] for name in ("sampling-test", "certify", "soak"))
    assert all(each["passed"] for each in kept["conformance-cuda"]["outcomes"])


def test_suites_of_one_gpu_are_kept_whole_and_all_are_equal():
    for value in (each for name, each in kept_results().items() if name.startswith("bench-")):
        finished = [group for each in value["runs"] for group in each["finished"]]
        if not SUITES[value["suite"]].needs_ranks:
            assert sorted(finished) == sorted(SUITES[value["suite"]].groups)
        assert all(check["passed"] for row in value["rows"] for check in row["checks"].values())
        assert all(each["versions"]["gpu"] == "NVIDIA H200" for each in value["runs"])


# Proofs


def run_two_cells(file: Path, shard: str | None = None) -> dict:
    """Run two cells, or one of them, and write as if the fast implementation had run them on a GPU."""
    run_grid("g", grid("quick")[:2], impl="reference", shard=shard, json_file=file)
    value = read(file) | ON_GPU | {"impl": "fast", "device": "cuda"}
    assert all(each.startswith("not covered") for each in value["failures"])  # not required of two cells
    return value | {"failures": []}


@pytest.fixture(scope="module")
def grid_result(tmp_path_factory):
    return run_two_cells(tmp_path_factory.mktemp("grid") / "grid.json")


def test_a_part_of_a_grid_is_not_kept(keep, tmp_path):
    with pytest.raises(InputError, check=is_about("not 1 of 2 cells")):
        keep(run_two_cells(tmp_path / "shard.json", shard="1/2"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": {"torch": "2"}}, "on a GPU"),
        ({"impl": "reference"}, "a run of the reference"),
        ({"mismatches": 7, "failures": ["7 mismatches"]}, "a run that failed"),
    ],
)
def test_a_grid_that_proves_nothing_is_not_kept(keep, grid_result, change, reason):
    with pytest.raises(InputError, check=is_about(reason)):
        keep(grid_result | change)


def test_a_grid_is_kept_without_its_cells(keep, grid_result):
    kept = read(keep(grid_result | {"incomplete_cells": ["one", "another", "a third"]}))
    assert kept["decisions"] > 0
    assert kept["incomplete_cells"] == 3
    assert "results" not in kept


def test_a_grid_is_a_row_with_its_shares(keep, grid_result):
    compared = {"compared": {"tokens": 60, "logprobs": 3}, "not_compared": {"tokens": 1}}
    figures = {"decisions": 1000, "within_rounding_error": 15, "mismatches": 2, "max_logprob_error": 0.25}
    path = keep(grid_result | compared | figures)
    assert "| g | float32 | 2 | 98.4% | 1,000 | 15 (1.500%) | 2 | 2.5e-01 |" in grids(path.parent).splitlines()


BOTH = {"is_ok": True, "failures": []}
FAST = {"impl": "fast"}
REFERENCE = {"impl": "reference"}
NO_PROOF = "a result that specsim diff, sampling-test, certify"
REFUSED = [
    ("demo", {}, NO_PROOF),
    ("", {}, NO_PROOF),
    ("sampling-test", {"versions": {"torch": "2"}}, NO_PROOF),
    ("certify", {"is_ok": False, "failures": ["no constant distribution"], "certificates": []}, "a run that failed"),
    ("sampling-test", {"is_ok": False, "tests": [REFERENCE | {"is_control": True}]}, "a run that failed"),
    ("certify", {"failures": ["no constant distribution"], "certificates": []}, "a run that failed"),
    ("soak", {"is_ok": False, "failures": [], "missing": ["resumed"]}, "a run that failed"),
    ("conformance", {"outcomes": [{"passed": True}, {"passed": False}]}, "a run that failed"),
    ("conformance", {"outcomes": []}, "a run without checks"),
    ("certify", BOTH | {"certificates": []}, "a run without checks"),
    ("certify", {"certificates": [FAST]}, "a run that failed"),
    ("sampling-test", BOTH | {"tests": [FAST, REFERENCE]}, "a run of the reference"),
    ("certify", BOTH | {"certificates": [FAST, REFERENCE]}, "a run of the reference"),
]


@pytest.mark.parametrize(("command", "change", "reason"), REFUSED)
def test_results_that_do_not_prove_fast_are_not_kept(keep, command, change, reason):
    with pytest.raises(InputError, check=is_about(reason)):
        keep({"command": f"specsim {command}".rstrip()} | ON_GPU | change)


@pytest.mark.parametrize(("command", "rows"), [("sampling-test", "tests"), ("certify", "certificates")])
def test_a_proof_of_only_fast_is_kept(keep, command, rows):
    assert keep({"command": f"specsim {command} --impl both"} | ON_GPU | BOTH | {rows: [FAST]})


def test_a_proof_is_a_row_with_its_command(keep):
    path = keep({"command": "specsim faults --device cuda", "faults": 40, "detected_as_named": 39} | ON_GPU)
    assert [each.name for each in path.parent.iterdir()] == ["faults-cuda.json"]
    [*_, row, _, run] = proofs(path.parent).splitlines()
    assert row == "| `specsim faults --device cuda` | 39 of 40 injected faults detected by a named field |"
    assert run == MEASURED


def rows(names: str, *values: tuple) -> list[dict]:
    return [dict(zip(names.split(), each, strict=True)) for each in values]


SAMPLING_TESTS = (1000, False, True), (200, False, False), (30, False, False), (5, True, True), (7, True, False)
DISTANCES = ("lossless", 0.0), ("lossless", 0.0), ("lossless", 0.25), ("lossy", 0.5), ("wrong", 0.125), ("wrong", 0.0)
OUTCOMES = ("equal", True), ("equal", True), ("refused", True), ("different", False)


@pytest.mark.parametrize(
    ("name", "value", "summary"),
    [
        (
            "sampling-test",
            {"tests": rows("tokens is_control is_rejected", *SAMPLING_TESTS)},
            "3 tests of 1,230 tokens, 1 rejected; 1 of 2 controls (wrong on purpose, on the CPU) rejected",
        ),
        (
            "certify",
            {"certificates": rows("promise total_variation_float", *DISTANCES)},
            "2 of 3 lossless cases have exactly the target's distribution; "
            "1 of 2 controls (wrong on purpose) have another",
        ),
        ("conformance", {"outcomes": rows("status passed", *OUTCOMES)}, "4 cases: 2 equal, 1 refused, 1 wrong"),
        (
            "soak",
            {"figures": {"requests": 2000, "slots audited": 12345, "mismatches": 2}},
            "2,000 requests, 12,345 slots audited, 2 mismatches",
        ),
    ],
)
def test_every_proof_has_its_counts(name, value, summary):
    assert SUMMARIES[name](value) == summary
    assert tuple(SUMMARIES) == PROOFS


def test_a_soak_is_kept_without_its_programs(keep):
    soak = {"command": "specsim soak --device cuda", "is_ok": True, "figures": {"requests": 1}, "programs": [{}]}
    assert read(keep(soak | ON_GPU)) == {name: value for name, value in soak.items() if name != "programs"} | ON_GPU


CHANGED = {**code_digests(), "specsim.fast.tree": "0", "specsim.fast.gone": "1"}


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        (code_digests(), []),
        (CHANGED, ["specsim.fast.gone", "specsim.fast.tree"]),
        ({"specsim.fast.tree": code_digests()["specsim.fast.tree"]}, []),
        (None, list(code_digests())),
    ],
    ids=["same", "changed", "few", "unknown"],
)
def test_a_result_of_other_code_is_stale(keep, code, changed):
    versions = {name: each for name, each in (VERSIONS | {"code": code}).items() if each}
    faults = {"command": "specsim faults --device cuda", "faults": 40, "detected_as_named": 39}
    path = keep(faults | ON_GPU | {"versions": versions})
    assert stale(path.parent).get(path.name, []) == changed
    mark = f" **Stale**, since code that they ran has changed: `{faults['command']}`."
    assert proofs(path.parent).splitlines()[-1] == MEASURED + (mark if changed else "")


# Benchmarks


def bench_row(name: str, setting: dict, ours: float | None = None, limit: float = 0.0, **baselines: float) -> dict:
    """Row of a benchmark with a bound of 4 µs; `limit`: of a target for the time, 0 for none."""
    medians = ({"ours": ours} if ours else {}) | baselines
    ratio = (ours or 0) / 4
    target = {"name": "time / roofline bound", "value": ratio, "limit": limit, "reached": ratio <= limit}
    return {
        "name": name,
        "setting": setting,
        "timings": {each: {"median_us": median, "spread": 1.0} for each, median in medians.items()},
        "roofline_bound_us": 4.0 if ours else None,
        "time_over_bound": ours / 4 if ours else None,
        "targets": [target] if limit else [],
    }


ROWS = [bench_row("linear", {"rows": 8}, 5.0, limit=1.3), bench_row("linear", {"rows": 64}, library=9.0)]


def suite_run(groups: str, *bench_rows: dict, **changes) -> dict:
    """Result of one run of a made-up suite whose groups are `some` and `others`, the first by default for rows."""
    bench_rows = [{"group": groups.partition(" ")[0]} | row for row in bench_rows]
    head = {"command": f"specsim bench --suite kernels --only {groups}", "seconds": 1.0, "finished": groups.split()}
    verdict = {"suite": "kernels", "shape": "llama-3-8b", "is_quick": False, "passed": True}
    return head | ON_GPU | verdict | {"measured_peaks": {"read": 1e12, "dense": 1e12}, "rows": bench_rows} | changes


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.setattr(results, "SUITES", {"kernels": Suite({"some": None, "others": None}, 60)})


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    ("groups", "changes", "reason"),
    [
        ("", {}, "without a finished group; its groups, each once: some, others"),
        ("some some", {}, "some, some; its groups, each once"),
        ("some more", {}, "some, more; its groups, each once"),
        ("some others", {"is_quick": True}, "a quick run"),
        ("some others", {"suite": "nope"}, "an unknown suite"),
        ("some others", {"measured_peaks": None}, "one of the CPU"),
        ("some others", {"shape": "../a/config.json"}, "a shape without a name"),
        ("some others", {"passed": False}, "not equal"),
    ],
)
def test_unknown_groups_and_failures_are_not_kept(keep, groups, changes, reason):
    with pytest.raises(InputError, check=is_about(reason)):
        keep(suite_run(groups, *ROWS, **changes))


@pytest.mark.usefixtures("suite")
def test_runs_of_different_versions_are_not_kept(keep):
    with pytest.raises(InputError, check=is_about("runs of different GPUs or versions")):
        keep(suite_run("some", *ROWS), suite_run("others", versions=VERSIONS | {"torch": "1"}))


@pytest.mark.usefixtures("suite")
def test_pages_name_incomplete_groups_and_the_number_of_gpus(keep):
    row = bench_row("linear", {"GPUs": 2, "rows": 8}, 5.0)
    cut = {"group": "others"} | bench_row("linear", {"rows": 9}, 5.0)
    page = bench_page(keep(suite_run("some", row, cut)).parent)
    assert "\nNot complete: others.\n" in page
    assert MEASURED.replace("one ", "2 x ") in page
    assert "rows 9" in page
    page = bench_page(keep(suite_run("others", bench_row("linear", {"rows": 7}, 5.0))).parent)
    assert "Not complete" not in page
    assert "rows 8" in page
    assert "rows 7" in page
    assert "rows 9" not in page


@pytest.mark.usefixtures("suite")
def test_a_suite_is_kept_in_parts_and_shown_as_one_table(keep):
    keep(suite_run("some others"))
    path = keep(suite_run("some", ROWS[0]), suite_run("others", ROWS[1]))
    assert path.name == "bench-kernels.json"
    page = bench_page(path.parent)
    assert "`specsim bench --suite kernels`:" in page
    target = "time / roofline bound 1.25, target 1.30: reached"
    assert f"| linear | rows 8 | 5.0 ±0.5 % | 4.0 | 1.25 | {target} |  |" in page
    assert "| linear | rows 64 | equal |  |  |  | 9.0 (library) |" in page
    assert page.endswith(f"{MEASURED} Measured peaks of these runs: 1.00 TB/s read, 1 TFLOP/s of dense bf16.\n")
    assert "rows 8" in performance(path.parent)
    assert "rows 64" not in performance(path.parent)  # it has no target


def test_served_loads_stand_beside_their_predictions(keep):
    setting = {"tree": "plain", "concurrency": 4, "schedule": "overlap"}
    figures = {"tokens_per_s": 800.0, "tpot_ms": 5.0, "ttft_ms": 20.0, "gpu_busy": 0.98, "gain_over_sync": 1.05}
    predicted = {"predicted_tokens_per_s": 840.0, "predicted_tpot_ms": 4.9, "predicted_ttft_ms": 22.0}
    load = bench_row("serving, plain", setting, 1250.0) | {"figures": figures | predicted}
    summary = bench_row("predictions of held-out loads", {"held out": 1}, limit=0.05) | {"checks": {}}
    changes = {"suite": "serving", "finished": ["loads", "prefill"]}
    page = performance(keep(suite_run("loads prefill", load, summary, **changes)).parent)
    cells = "800 | 840 (+5.0%) | 5.00 | 4.90 (-2.0%) | 20.0 | 22.0 (+10.0%) | 98.0% | 1.050"
    assert f"| tree plain, concurrency 4, schedule overlap | {cells} |" in page
    assert "| predictions of held-out loads | held out 1 |  |" in page


@pytest.mark.usefixtures("suite")
def test_rows_that_time_cut_off_are_not_kept(keep):
    cut = suite_run("some", ROWS[0], ROWS[1] | {"group": "others"}, unfinished=1)
    path = keep(cut, suite_run("others", *ROWS[::-1]))
    assert [row["setting"]["rows"] for row in read(path)["rows"]] == [8, 64, 8]


@pytest.mark.usefixtures("suite")
def test_a_new_run_replaces_only_its_own_groups(keep):
    old, new = ({"versions": VERSIONS | {"code": code}} for code in (CHANGED, code_digests()))
    keep(suite_run("some others", ROWS[0], ROWS[1] | {"group": "others"}, **old))
    path = keep(suite_run("some", bench_row("linear", {"rows": 8}, 4.0), **new))
    kept = read(path)
    assert [run["finished"] for run in kept["runs"]] == [["others"], ["some"]]
    assert [row["timings"].get("ours", {}).get("median_us") for row in kept["rows"]] == [4.0, None]
    stale_part = "**Stale**, since code that they ran has changed: `specsim bench --suite kernels` (others)."
    assert stale_part in bench_page(path.parent)
    kept = read(keep(suite_run("others", ROWS[1], **new)))
    assert [run["finished"] for run in kept["runs"]] == [["some"], ["others"]]
    assert "Stale" not in bench_page(path.parent)


@pytest.mark.usefixtures("suite")
def test_many_settings_are_shown_by_best_median_and_worst(keep):
    growth = [bench_row("growth", {"B": place}, 4.0 + place, limit=1.5) for place in range(11)]
    path = keep(suite_run("some others", *growth))
    lines = [line for line in performance(path.parent).splitlines() if line.startswith("| growth")]
    assert [line.split("|")[2].strip() for line in lines] == ["best: B 0", "median: B 5", "worst: B 10"]
    assert "3 of 11 settings reach all targets" in lines[2]


@pytest.mark.usefixtures("suite")
def test_texts_of_earlier_results_are_shown_in_todays_words(keep):
    row = bench_row("columns, selection and tree", {"rows": 8}, 5.0, limit=1.3)
    row["targets"][0]["name"] = "time / floor (60% of read bandwidth)"
    page = bench_page(keep(suite_run("some others", row)).parent)
    assert "| cache locations, selection and tree |" in page
    assert "time / roofline bound (60% of read bandwidth) 1.25, target 1.30: reached" in page


def test_nothing_kept_is_an_empty_table(tmp_path):
    assert performance(tmp_path) == ""
    assert figures(tmp_path) == ""


def test_headline_figures_are_those_of_the_results(tmp_path):
    def write(name: str, value: dict) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(value))

    write("diff-full-float32-cuda", {"decisions": 1234, "mismatches": 2, "num_cells": 5})
    promises = [("lossless", 0.0), ("lossless", 1e-3), ("wrong", 0.0)]
    certificates = [{"promise": promise, "total_variation_float": distance} for promise, distance in promises]
    write("certify-cuda", {"command": "specsim certify", "certificates": certificates})
    rows = [
        {
            "name": "EAGLE-3 round",
            "setting": {"tree": tree},
            "time_over_bound": 1.5,
            "timings": {"ours": {"median_us": time}},
        }
        for tree, time in (("other", 1.0), ("(4, 3, 8)", 2500.0))
    ]
    write("bench-round", {"shape": "a-shape", "runs": [{"versions": {"gpu": "a GPU"}}], "rows": rows})
    first, second, third = figures(tmp_path).splitlines()
    assert "**1,234 decisions, 2 mismatches**" in first
    assert "in 5 settings" in first
    assert "**1 of 2 lossless cases exact**" in second
    assert (
        "**2.50 ms a round, 1.50 × the roofline bound**: EAGLE-3 on a-shape (bfloat16, one request, one a GPU)" in third
    )


# The command

SLOW = (
    "six-cells",
    "left-out",
    "speed-ups",
    "choices",
    "targets",
    "combinations",
)  # compared with their pages elsewhere


def test_the_command_keeps_results_and_writes_the_tables(tmp_path, capsys):
    kept = tmp_path / "fast" / "measurements"
    notes = tmp_path / "papers" / "one" / "notes.md"
    for folder in (kept, notes.parent):
        folder.mkdir(parents=True)
    notes.write_text("<!-- ledger leviathan_table1 -->\nold\n<!-- /ledger leviathan_table1 -->\n")
    names = [name for name in REGIONS if name not in SLOW]
    old = "before\n" + "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names) + "after\n"
    guide = tmp_path / "notebooks" / "guide" / "page.md"
    guide.parent.mkdir(parents=True)
    for page in (tmp_path / "README.md", guide):
        page.write_text(old)
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"command": "specsim faults", "faults": 2, "detected_as_named": 1} | ON_GPU))
    tables.main([str(file)], root=tmp_path)
    assert capsys.readouterr().out == f"{kept / 'faults-cuda.json'}\n"
    new = [f"\n{tables.region(name, kept).strip()}\n\n" for name in names]
    assert (tmp_path / "README.md").read_text() == guide.read_text() == old.replace("old\n", "{}").format(*new)
    assert "| `specsim faults` | 1 of 2 injected" in (tmp_path / "README.md").read_text()
    assert (kept / "README.md").read_text() == bench_page(kept)
    assert "| setting | figure |" in notes.read_text()


@pytest.mark.parametrize(
    ("text", "reason"), [("[]", "has no"), ("{", "no JSON"), ('{"suite": "kernels"}', "has no"), (None, "No such file")]
)
def test_another_file_is_refused_in_a_sentence(text, reason, tmp_path, capsys):
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        tables.main([str(file)])
    sentence = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence.count("\n") == 1
    assert reason in sentence


def test_help_names_the_results_and_writes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        tables.main(["--help"], root=tmp_path)
    assert ended.value.code == 0
    assert "JSON files that commands wrote on a GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_status_2_for_bad_input(tmp_path):
    command = [sys.executable, "-m", "specsim.maintain.tables", str(tmp_path / "none.json")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
