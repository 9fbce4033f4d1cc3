import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specsim.core.display import stdout_console
from specsim.core.errors import InputError
from specsim.core.user_module import load_module
from specsim.correctness.conformance import chains, runner
from specsim.correctness.conformance.chains import ROWS, distribution_of
from specsim.correctness.conformance.comparison import difference, guard
from specsim.correctness.conformance.contract import (
    BY_NAME,
    DEVICE,
    OPERATIONS,
    Call,
    KernelCase,
    SampleDistribution,
    Value,
    arguments,
    replaced,
    strided,
)
from specsim.correctness.conformance.report import ConformanceReport
from specsim.correctness.conformance.runner import CASES, CaseProcess, call, chosen_operations, function_of

TESTS = Path(__file__).parent
PLAIN = str(TESTS / "plain_kernels.py")
FAST = "specsim.correctness.conformance.fast_adapter"
PAGE = TESTS.parents[1] / "specsim" / "correctness" / "conformance" / "README.md"
CPU = torch.device("cpu")
DEVICE_HERE = "cuda" if torch.cuda.is_available() else "cpu"


def cases_of(operation: str) -> list[KernelCase]:
    return [case for case in CASES if case.operation == operation]


# The table and the cases


def test_every_operation_has_cases_with_unique_names():
    assert {case.operation for case in CASES} == set(BY_NAME) == {operation.name for operation in OPERATIONS}
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(any("no requests" in case.name or "no rows" in case.name for case in cases_of(name)) for name in BY_NAME)


def fits(shape: str, size: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Whether a size is of the shape; a letter stands for one number in all arguments of a call."""
    if shape == "*":
        return True
    letters = shape.split(",") if shape else []
    for letter, count in zip(letters, size, strict=True) if len(letters) == len(size) else ():
        if letter.isalpha():
            sizes.setdefault(letter, count)
    known = all(set(re.findall("[A-Z]", letter)) <= set(sizes) for letter in letters)
    return len(letters) == len(size) and (not known or [eval(each, dict(sizes)) for each in letters] == list(size))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_arguments_and_results_match_the_table(operation):
    for case in (case for case in cases_of(operation.name) if not case.may_refuse):
        made, sizes = case.build(), {}
        assert list(made.arguments) == [value.name for value in operation.arguments]
        assert set(made.expected) <= {value.name for value in operation.results}
        given = made.arguments | made.expected
        scalars = {name: value for name, value in given.items() if isinstance(value, int)}
        names = {"topk": "K", "num_steps": "S", "depth": "S", "draft_token_num": "N", "num_draft_token": "N"}
        sizes |= {letter: scalars[name] for name, letter in names.items() if name in scalars}
        for value in operation.values:
            held = given.get(value.name)
            for tensor in held if isinstance(held, list) else [held]:
                if isinstance(tensor, (torch.Tensor, SampleDistribution)):
                    assert value.dtype in (str(tensor.dtype).removeprefix("torch."), "bool or packed"), case.id
                    assert fits(value.shape, tuple(tensor.shape), sizes), (case.id, value, tensor.shape, sizes)


def test_the_page_lists_the_operations():
    page = PAGE.read_text(encoding="utf-8")
    for operation in OPERATIONS:
        functions = ", ".join(f"`{name}`" for name in operation.functions)
        assert f"| `{operation.name}` | {functions} | {operation.origin} | {operation.summary} |" in page


def test_the_page_names_a_case_for_every_input():
    assert {operation for operation, *_ in INJECTED} == set(BY_NAME)
    _, table = PAGE.read_text(encoding="utf-8").split("## Inputs of the cases")
    inputs = dict(re.findall(r"^\| ([^`|]+) \| (.*`.*) \|$", table.split("## ")[0], re.MULTILINE))
    named = {name for cases in inputs.values() for name in re.findall(r"`(\w+: [^`]+)`", cases)}
    assert named <= {case.id for case in CASES}
    assert {case.id for case in CASES if case.may_refuse} <= named
    guide = (TESTS.parents[1] / "notebooks" / "guide" / "conformance.md").read_text(encoding="utf-8")
    listed = re.findall(r"## What the cases contain\n\n(.*), and ordinary random input", guide, re.DOTALL)[0]
    assert re.split(r",\s+", listed.replace("Ties", "ties")) == [name.replace("\n", " ") for name in inputs]


def test_logits_go_to_functions_that_name_them():
    case, logits = cases_of("chain_rejection")[0], lambda a, b, c, d, e, target_logits, f, g: None
    made = case.build()
    assert torch.equal(case.adapt(logits, made).arguments["target_probs"], made.arguments["target_probs"].log())
    assert case.adapt(max, made) is made


# Whole modules


def test_a_third_partys_module_passes_every_case():
    plain = load_module(PLAIN)
    outcomes = [call(function_of(plain, BY_NAME[case.operation]), case, CPU) for case in CASES]
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert {outcome.status for outcome in outcomes if "malformed" in outcome.case} == {"equal", "refused"}


@pytest.mark.parametrize("operation", BY_NAME)
def test_the_fast_implementation_passes_every_case(operation, monkeypatch):
    """Distributions get few draws where kernels are interpreted; certify has them exactly, a GPU has all draws."""
    if DEVICE_HERE == "cpu":
        monkeypatch.setattr(chains, "ROWS", 8)
    function, device = function_of(load_module(FAST), BY_NAME[operation]), torch.device(DEVICE_HERE)
    outcomes = [call(function, case, device) for case in cases_of(operation)]
    assert [outcome for outcome in outcomes if not outcome.passed] == []


# Errors injected for the clauses of an operation: it, changed text, new text, and text of the report that shows it.
RANKED = "torch.sort({}, dim=dim, descending=True, stable=True).indices"
RESIDUAL = "((weights - draft).clamp(min=0) / noise[row])"
INJECTED = [
    ("draft_topk", "order.gather(dim, nan_first)[:, :topk]", "order[:, :topk]", "NaN"),
    ("draft_topk", RANKED.format("ranked"), f"values.shape[1] - 1 - {RANKED.format('ranked.flip(dim)')}", "ties"),
    ("expand", "+ topk + topk * topk * (i - 1)", "+ topk + topk * topk * i", "tree_parents"),
    ("select", "1, -1)[1].sort(dim=-1).values", "1, -1)[1]", "top_scores_index"),
    ("build_tree", "retrive_next_sibling[b, older] = younger", "retrive_next_sibling[b, younger] = older", "sibling"),
    ("build_tree", "sum(1 << other for other in seen)", "sum(1 << other for other in seen if other < 31)", "32 nodes"),
    ("verify_greedy", "or candidates[b, child] == wanted", "or True", "predicts["),
    ("verify_target_only", "if uniform <= held", "if uniform < held", "edges"),
    ("verify_target_only", "uniform_samples[b, node]", "uniform_samples[b, min(node, 1)]", "uniforms on the edges"),
    ("bonus_tokens", "accept_stride + length - 1]", "accept_stride + length - 2]", "bonus_tokens"),
    (
        "move_kv",
        "keys[tgt_loc] = keys[src_loc]",
        "for i in range(len(src_loc))[::-1]: keys[tgt_loc[i]] = keys[src_loc[i]]",
        "k_buffer",
    ),
    ("cache_locations", "req_to_token[req_pool_indices[b],", "req_to_token[b,", "out_cache_loc"),
    ("lane_locations", "append(req_to_token[row, length - tail : length]", "append(target[-1]", "source_cache_loc"),
    ("shift_ids", "first + 1 : first + length].clone()", "first : first + length - 1].clone()", "input_ids"),
    ("tree_attention", "q.shape[-1] ** 0.5).softmax", "q.shape[-1] ** 0.499).softmax", "o["),
    ("tree_attention", "word >> other & 1 == 1", "word >> min(other, 30) & 1 == 1", "32 nodes"),
    ("chain_rejection", "(weights - draft).clamp(min=0)", "weights", "distribution: "),
    ("chain_rejection", "kept = token >= 0 and", "kept =", "distribution: a placeholder"),
    ("chain_rejection", RESIDUAL, f"torch.cat([{RESIDUAL}.nan_to_num(-1.0), torch.zeros(1)])", "a row of NaN"),
]


def module_of(source: str, tmp_path: Path) -> str:
    path = tmp_path / f"{tmp_path.name}_kernels.py"
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize(("operation", "change", "into", "shown"), INJECTED)
def test_an_injected_error_is_found(operation, change, into, shown, tmp_path):
    source = Path(PLAIN).read_text()
    assert source.count(change) == 1
    function = function_of(load_module(module_of(source.replace(change, into), tmp_path)), BY_NAME[operation])
    outcomes = [call(function, case, CPU) for case in cases_of(operation) if "malformed" not in case.name]
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    assert any(shown in f"{outcome.case} {outcome.detail}" for outcome in wrong)
    assert {outcome.status for outcome in wrong} == {"different"}


# The command


def test_the_command_names_the_case_and_first_wrong_element(tmp_path, call):
    source = Path(PLAIN).read_text().replace("= topk_index[b]", "= topk_index[0]")
    module, file = module_of(source, tmp_path), tmp_path / "report.json"
    options = ["--module", module, "--ops", "shift_ids,move_kv", "--device", "cpu", "--json", str(file)]
    status, printed, _ = call("conformance", *options)
    assert status == 1
    assert re.search(r"shift_ids +rotate_input_ids_triton +4 +1 +0 +3", printed)
    shown = "input_ids[2]: expected 8, found 7 (2 elements differ)"
    assert (
        f"shift_ids: chunks of 1, 2 and 8 tokens\n    different: {shown}\n       index  [0]  [1]  [2]  [3] " in printed
    )
    assert re.search(r"\n +expected +7  102 +8  104 .*\n +found +7  102 +7  104 ", printed)
    report = json.loads(file.read_text())
    assert report["functions"] == {"shift_ids": "rotate_input_ids_triton", "move_kv": "move_kv_cache_native"}
    assert {each["operation"] for each in report["outcomes"] if not each["passed"]} == {"shift_ids"}
    assert {"date", "versions", "module", "device"} <= set(report)


def test_a_message_of_several_lines_stands_under_its_case(capsys):
    outcome = runner.CaseOutcome("select", "a chain", "raised", "CompilationError: at 30:4:\nno such type")
    ConformanceReport("my_kernels", "cpu", {"select": "organize_draft_results"}, (outcome,)).show(stdout_console())
    assert "select: a chain\n    raised: CompilationError: at 30:4:\n    no such type\n" in capsys.readouterr().out


def test_the_pages_adapter_passes(tmp_path, call):
    """Every case, a malformed tree in its own process included."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    status, printed, _ = call("conformance", "--module", module_of(source, tmp_path), "--device", "cpu")
    assert (status, "Wrong" in printed) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--module", "no_such_module"], "No module named 'no_such_module'"),
        (["--module", "no_such_file.py"], "there is no such file"),
        (["--module", "json"], "a module with at least one of the functions fast_topk,"),
        (["--module", ".."], "a module that Python can import"),
        (["--module", PLAIN, "--ops", "build_trees"], "ops is 'build_trees'; allowed: draft_topk, expand,"),
        (
            ["--module", "specsim.correctness.conformance.fast_verifiers", "--ops", "select"],
            "for this one it needs organize_draft_results",
        ),
        (["--module", PLAIN, "--device", "tpu"], "device is 'tpu'"),
        (["--module", PLAIN, "--json", "no/such/folder.json"], "json is"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, call):
    status, _, error = call("conformance", *arguments)
    assert (status, error.count("\n")) == (2, 1)
    assert sentence in error


LAZY = """
def __getattr__(name):
    if name == "fill_bonus_tokens":
        {}
    raise AttributeError(name)
"""


def test_a_module_may_make_its_functions_lazily(tmp_path):
    source = LAZY.format("return lambda *arguments: None")
    report = ConformanceReport.of(module_of(source, tmp_path), None, "cpu")
    assert report.functions == {"bonus_tokens": "fill_bonus_tokens"}
    assert {outcome.status for outcome in report.failures} == {"different"}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("1 / 0", "(ZeroDivisionError: division by zero, {}, line 1)"),
        ("raise ImportError('no\\nlibcuda')", "(ImportError: no libcuda, {}, line 1)"),
        ("import sys; sys.exit(0)", "(SystemExit: 0, {}, line 1)"),
        (LAZY.format("raise ImportError('no libcuda')"), "(ImportError: no libcuda, {}, line 4)"),
    ],
)
def test_a_module_that_fails_at_import_or_later_is_bad_input(source, shown, tmp_path):
    module = module_of(source, tmp_path)
    shown = shown.format(Path(module).name)
    with pytest.raises(InputError, check=lambda error: error.name == "module" and error.allowed.endswith(shown)):
        ConformanceReport.of(module, None, "cpu")


def test_a_modules_own_defaults_do_not_reach_the_cases():
    """Cases and memory are made under torch's default settings."""
    topk = function_of(load_module(PLAIN), BY_NAME["draft_topk"])
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        outcomes = [call(topk, case, CPU) for case in cases_of("draft_topk")]
        assert (torch.empty(0).dtype, torch.empty(0).device.type) == (torch.float64, "meta")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert {outcome.status for outcome in outcomes} == {"equal"}


def test_a_file_is_executed_once_until_it_changes(tmp_path):
    counted = tmp_path / "executions"
    count = f"with open({str(counted)!r}, 'a') as file: file.write('x')\n"
    module = module_of(count + Path(PLAIN).read_text(), tmp_path)
    assert ConformanceReport.of(module, ["bonus_tokens", "shift_ids"], "cpu").failures == ()
    assert counted.read_text() == "xx"  # here, and in the process of the cases
    os.utime(module, (0, 0))
    load_module(module)
    assert counted.read_text() == "xx"
    Path(module).write_text(Path(module).read_text() + "# changed\n")
    load_module(module)
    assert counted.read_text() == "xxx"


# The plugin


def test_the_cases_run_as_tests(tmp_path):
    assert "specsim.correctness.conformance.plugin" in {each.value for each in entry_points(group="pytest11")}
    source = Path(PLAIN).read_text().replace("stride + length - 1]", "stride + length - 2]")
    options = ["--impl", module_of(source, tmp_path), "--impl-ops", "bonus_tokens,shift_ids", "--impl-device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "specsim.correctness.conformance",
         *options],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "3 failed, 5 passed" in done.stdout
    assert "bonus_tokens: rows of 4, of trees of 8: different: bonus_tokens[0]: expected 1000, found" in done.stdout


# The comparison itself


def outcome_of(function, call_made: Call, operation: str = "bonus_tokens", **case) -> runner.CaseOutcome:
    return call(function, KernelCase(operation, "made up", lambda: call_made, **case), CPU)


MADE = Call(
    arguments("bonus_tokens", torch.arange(6).int(), torch.tensor([1, 3]).int(), torch.tensor([-7, -7]).int(), 3),
    {"bonus_tokens": torch.tensor([0, 5]).int()},
)
CHANGED = "expected an unchanged input, found changed content"


def right(tokens, lens, out, stride):
    out.copy_(tokens[torch.arange(len(lens)) * stride + lens - 1])


def beside(tokens, lens, out, stride):
    right(tokens, lens, out, stride)
    out.as_strided((1,), (1,), out.storage_offset() + len(out)).fill_(9)


def in_its_input(tokens, lens, out, stride):
    right(tokens, lens, out, stride)
    lens += 1


def resizing(tokens, lens, out, stride):
    right(tokens, lens, out, stride)
    lens.resize_(500)


def retyping(tokens, lens, out, stride):
    right(tokens, lens, out, stride)
    lens.data = lens.long()


def swapping(tokens, lens, out, stride):
    own = out.clone()
    right(tokens, lens, own, stride)
    out.data = own


def nothing(*arguments):
    pass


class Stop(BaseException):
    pass


def raising(error: BaseException):
    def function(*arguments):
        raise error

    return function


NOT_CONTIGUOUS = raising(ValueError("not contiguous"))
# Functions, whether they may refuse, the outcome, and how its detail ends.
OUTCOMES = {
    "right": (right, False, "equal", ""),
    "beside": (beside, False, "different", "no write outside the tensor, found a write out of bounds"),
    **{
        function.__name__: (function, False, "different", f"accept_lens: {CHANGED}")
        for function in (in_its_input, resizing, retyping)
    },
    "swapping": (swapping, False, "different", ": expected a tensor in its own memory, found one in other memory"),
    "an error": (NOT_CONTIGUOUS, False, "raised", "ValueError: not contiguous"),
    "a refusal": (NOT_CONTIGUOUS, True, "refused", "ValueError: not contiguous"),
    "nothing": (nothing, True, "different", ""),
    # An exit or an error of the GPU is no refusal.
    "an exit": (raising(SystemExit(0)), True, "raised", "SystemExit: 0"),
    "a stop": (raising(Stop()), True, "raised", ""),
    "a GPU's error": (raising(torch.AcceleratorError("an illegal access")), True, "raised", ""),
}


@pytest.mark.parametrize(("function", "may_refuse", "status", "detail"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_call_has_its_outcome(function, may_refuse, status, detail):
    """Writes outside the results are found, and inputs of another form."""
    outcome = outcome_of(function, MADE, may_refuse=may_refuse)
    assert outcome.status == status
    assert outcome.detail.endswith(detail)


def test_an_interruption_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        outcome_of(raising(KeyboardInterrupt()), MADE)


CHANGES = {
    "a tensor of the metadata": (lambda lens, meta: meta.temperature.zero_(), f"sampling_metadata: {CHANGED}"),
    "a field of the metadata": (lambda lens, meta: setattr(meta, "top_k", 1), f"sampling_metadata: {CHANGED}"),
    "generators in the metadata": (
        lambda lens, meta: meta.generators.update({0: None}),
        f"sampling_metadata: {CHANGED}",
    ),
    "one more length": (lambda lens, meta: lens.append(5), f"num_draft_tokens: {CHANGED}"),
    "a write outside a tensor": (
        lambda lens, meta: meta.temperature.as_strided((1,), (1,), meta.temperature.storage_offset() + 4).fill_(9),
        "found a write out of bounds",
    ),
}


@pytest.mark.parametrize(("change", "detail"), [(None, ""), *CHANGES.values()], ids=["none", *CHANGES])
def test_metadata_and_lists_are_inputs_too(change, detail):
    made = cases_of("chain_rejection")[0].build()

    def answering(*arguments):
        if change:
            change(arguments[1], arguments[7])
        return made.expected["output_token_ids"]

    outcome = outcome_of(answering, made, "chain_rejection")
    assert outcome.status == ("different" if change else "equal")
    assert outcome.detail.endswith(detail)


def test_number_and_device_of_results_are_checked():
    case = cases_of("draft_topk")[0]
    topk = function_of(load_module(PLAIN), BY_NAME["draft_topk"])

    def what(change) -> str:
        return call(lambda *arguments: change(topk(*arguments)), case, CPU).detail

    assert what(lambda results: results[:1]) == "topk_index: expected a tensor, found NoneType"
    assert what(lambda results: (*results, 3)) == "number of returned values: expected 2 (topk_p, topk_index), found 3"
    assert what(lambda results: results[0].to("meta")) == "topk_p: expected a tensor on cpu, found one on meta"


def test_a_call_gets_copies_with_the_same_strides():
    tensors = [value for value in MADE.arguments.values() if isinstance(value, torch.Tensor)]
    before = [each.clone() for each in tensors]
    outcome_of(in_its_input, MADE)
    assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))
    tensor = strided(torch.arange(12.0).view(3, 4))
    guarded = guard(tensor, CPU).tensor
    assert guarded.stride() == tensor.stride() == (8, 2)
    assert torch.equal(guarded, tensor)


def test_an_alternative_replaces_all_expected_results():
    other = Call(MADE.arguments, {"bonus_tokens": torch.tensor([1, 5]).int()}, alternatives=(MADE.expected,))
    assert outcome_of(right, other).status == "equal"
    assert outcome_of(right, replaced(other, accept_stride=2)).status == "different"


EXACT, CLOSE = Value("x", "float32", "*", "returned"), Value("x", "float32", "*", "returned", "close")
NAN = float("nan")
NUMBERS = Call({}, {"x": torch.tensor([1.0, NAN, 0.0])})
NEAR = Call({}, {"x": torch.tensor([1.0])}, tolerance=1e-3)
SECOND_ROW = Call({}, {"x": torch.zeros(2, 3)}, rows={"x": torch.tensor([False, True])})
SAMPLED = Call({}, {"x": SampleDistribution({(1, -1): 0.75, (2, -1): 0.25}, rows=4096)})


def sampled(ones: int, twos: int, others: int = 0) -> torch.Tensor:
    return torch.tensor([[1, -1]] * ones + [[2, -1]] * twos + [[3, -1]] * others, dtype=torch.int32)


RIGHT = sampled(3072, 1024)


@pytest.mark.parametrize(
    ("value", "expected", "found", "shown"),
    [
        (EXACT, NUMBERS, torch.tensor([1.0, NAN, 0.0]), None),
        (EXACT, NUMBERS, torch.tensor([1.0, NAN, -0.0]), None),
        (EXACT, NUMBERS, torch.tensor([1.0, 0.0, 0.0]), "x[1]: expected nan, found 0.0"),
        (EXACT, NUMBERS, torch.tensor([1.0, NAN, 1e-9]), "x[2]: expected 0.0, found 9.999999717180685e-10"),
        (EXACT, NUMBERS, torch.tensor([1.0, NAN]), "x: expected shape [3], found shape [2]"),
        (EXACT, NUMBERS, torch.zeros(3).double(), "x: expected dtype torch.float32, found dtype torch.float64"),
        (EXACT, NUMBERS, torch.zeros(3).to_sparse(), "x: expected layout torch.strided, found layout torch.sparse_coo"),
        (EXACT, NUMBERS, None, "x: expected a tensor, found NoneType"),
        (CLOSE, NEAR, torch.tensor([1.0009]), None),
        (CLOSE, NEAR, torch.tensor([1.0011]), "x[0]: expected 1.0, found 1.001099944114685"),
        (CLOSE, NEAR, torch.tensor([NAN]), "x[0]: expected 1.0, found nan"),
        (EXACT, SECOND_ROW, torch.tensor([[1.0, 1, 1], [0, 0, 0]]), None),
        (EXACT, SECOND_ROW, torch.tensor([[1.0, 1, 1], [0, 2, 0]]), "x[1, 1]: expected 0.0, found 2.0"),
        (EXACT, SAMPLED, RIGHT, None),
        (EXACT, SAMPLED, sampled(3000, 1096), None),
        (EXACT, SAMPLED, sampled(2860, 1236), "x: expected [1, -1] in 0.7500, found [1, -1] in 0.6982 of 4096 rows"),
        (EXACT, SAMPLED, sampled(3071, 1024, 1), "x[4095]: expected one of [1, -1], [2, -1], found [3, -1]"),
        (
            EXACT,
            SAMPLED,
            sampled(0, 0, 4096),
            "x[0]: expected one of [1, -1], [2, -1], found [3, -1] (4096 elements differ)",
        ),
        (EXACT, SAMPLED, RIGHT[:1], "x: expected shape [4096, 2], found shape [1, 2]"),
        (EXACT, SAMPLED, RIGHT[:0], "x: expected shape [4096, 2], found shape [0, 2]"),
        (EXACT, SAMPLED, RIGHT.flatten(), "x: expected shape [4096, 2], found shape [8192]"),
        (EXACT, SAMPLED, RIGHT[0, 0], "x: expected shape [4096, 2], found shape []"),
        (EXACT, SAMPLED, RIGHT.long(), "x: expected dtype torch.int32, found dtype torch.int64"),
        (EXACT, SAMPLED, RIGHT.double(), "x: expected dtype torch.int32, found dtype torch.float64"),
        (EXACT, SAMPLED, RIGHT.to_sparse(), "x: expected layout torch.strided, found layout torch.sparse_coo"),
    ],
)
def test_differences(value, expected, found, shown):
    made = difference(value, found, expected)
    assert (None if made is None else str(made)) == shown


def test_the_regions_of_the_distributions_are_fine_enough():
    """A breakpoint inside a region would give another distribution with regions of half the width."""
    for draft, prob, draft_prob in (
        ([0, 1], [[0.125, 0.5, 0.375, 0.0], [0.25] * 4], [[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125]]),
        ([3, 0], [[0.125, 0.5, 0.375, 0.0], [0.25] * 4], [[0.5, 0.25, 0.125, 0.125], [0.25] * 4]),
        ([1, 2], [[0.125, 0.5, 0.375, 0.0], [0.25, 0.25, 0.5, 0.0]], [[0.0, 1, 0, 0], [0.0, 0, 1, 0]]),
    ):
        assert distribution_of(draft, prob, draft_prob, 9, ROWS) == distribution_of(
            draft, prob, draft_prob, 9, ROWS, num_regions=16
        )
    assert ROWS == 4096


FRAGILE = """
import os, signal, time

def fill_bonus_tokens(tokens, lens, out, stride):
    if stride == 4 and len(lens):
        os._exit(0)
    if stride == 6:
        os.kill(os.getpid(), 9)
    if not len(lens):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # Python does not see the limit
        time.sleep(1200)
    out.copy_(tokens[torch.arange(len(lens)) * stride + lens - 1])
"""


def test_cases_after_one_that_breaks_its_process_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ANSWER_SECONDS", 0.5)
    (tmp_path / "fragile.py").write_text(f"import torch\n{FRAGILE}")
    with CaseProcess(str(tmp_path / "fragile.py"), "cpu", 1200) as process:
        outcomes = [process.run(case) for case in cases_of("bonus_tokens")[:-1]]
        process.seconds = 0.2
        outcomes.append(process.run(cases_of("bonus_tokens")[-1]))
    assert [(outcome.status, outcome.detail, outcome.passed) for outcome in outcomes] == [
        ("raised", "SystemExit: 0", False),
        ("ended", "its process was killed by signal 9 (SIGKILL), as the system does where memory is short,", False),
        ("equal", "", True),
        ("ended", "no result within 0.2 seconds (--time-limit)", False),
    ]


@pytest.mark.parametrize(
    ("body", "status", "is_sound"),
    [
        ("while True: pass", "ended", False),
        ("raise RuntimeError('no such size')", "raised", True),
        ("torch.ones = None; raise RuntimeError('illegal address')", "raised", False),  # as a GPU that keeps an error
    ],
)
def test_a_process_goes_on_only_while_its_device_computes(body, status, is_sound, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "ones", torch.ones)  # restored
    (tmp_path / "unsound.py").write_text(f"import torch\n\ndef fill_bonus_tokens(*arguments):\n    {body}")
    case = cases_of("bonus_tokens")[0]
    outcome, goes_on = runner._run(str(tmp_path / "unsound.py"), case.operation, case.name, "cpu", 0.2)
    assert (outcome.status, goes_on) == (status, is_sound)


def test_a_function_named_after_the_cpu_is_for_the_cpu():
    both = SimpleNamespace(verify_tree_greedy=lambda: "any", verify_tree_greedy_cpu=lambda: "cpu")
    assert function_of(both, BY_NAME["verify_greedy"], "cpu")() == "cpu"
    assert function_of(both, BY_NAME["verify_greedy"], "cuda")() == "any"
    assert function_of(SimpleNamespace(verify_tree_greedy=max), BY_NAME["verify_greedy"], "cpu") is max


def test_a_device_stands_for_itself():
    assert DEVICE in next(case for case in CASES if case.operation == "cache_locations").build().arguments.values()
    assert [operation.name for operation in chosen_operations(load_module(PLAIN), ["select", "select"])] == ["select"]
