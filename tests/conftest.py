"""Setup of every test: one thread, no network, deterministic operations, and NaN in unwritten memory."""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

# Read when the libraries load, so before torch is imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

gc.disable()  # until all tests are collected: nothing of that becomes garbage
sys.modules["rfc3987_syntax"] = None  # jsonschema builds 38 grammars of it for formats that no schema here has

# Processes that tests start import functions of test files; behind a copy of the package that is tested in its place.
sys.path.append(str(Path(__file__).parents[1]))

LEFT_OUT = pytest.StashKey[int]()  # number of cases of this run that are not run
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

# A background job of a shell ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
# With deterministic algorithms torch.empty returns NaN (for integers the largest one), so unwritten entries are
# visible.
torch.utils.deterministic.fill_uninitialized_memory = True

# Hypothesis uses the same examples in every run. To look for new ones: make test ARGS="--hypothesis-profile=default"
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser) -> None:
    parser.addoption("--whole", action="store_true", help="every combination of parameters, not every two values")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "whole: with --whole alone")
    config.addinivalue_line("markers", "by_default(*ids): cases of a test that run without --whole")
    config.addinivalue_line("markers", "every_value: every value of each parameter once, not every two values")


@pytest.hookimpl(trylast=True)  # after -k and -m, so that what they name is never left out as a whole
def pytest_collection_modifyitems(config, items) -> None:
    """Keep combinations of parameters in which every pair of values occurs.

    Keep all with --whole or a named case. Tests of whole engines are marked `every_value`: each of their cases takes
    half a second, and the grids of the differential have the pairs.
    """
    from specsim.correctness.pairwise import covering

    config.stash[LEFT_OUT] = 0
    if config.getoption("--whole") or any("[" in argument for argument in config.args):
        return
    by_test = {}
    for item in items:
        if item.get_closest_marker("whole") or not _is_default(item):
            continue
        by_test.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept = {item for group in by_test.values() for item in covering(group, _combinations)} or set(items)
    config.stash[LEFT_OUT] = len(items) - len(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt what exists before the first test, some million objects of libraries and tests, from garbage collection.

    A full collection then takes milliseconds instead of half a second. The capture of a graph begins with one.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session) -> None:
    """Send the number of cases left out from a pytest-xdist worker to the reporting process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Receive that number.

    Every worker collects, and leaves out, the same cases.
    """
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter) -> None:
    """Print how many cases were left out, and last whether the browser was."""
    skipped = terminalreporter.stats.get("skipped", [])
    if count := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} combinations of parameters left out: their values occur in others; --whole runs all."
        )
    if any("BROWSER=skip" in str(each.longrepr) or "no browser" in str(each.longrepr) for each in skipped):
        terminalreporter.write_line("The explorer's page was not tested in a browser: CONTRIBUTING.md says how.")


def _is_default(item) -> bool:
    marker = item.get_closest_marker("by_default")
    return marker is None or item.callspec.id in marker.args


def _combinations(item) -> Iterator[tuple]:
    """Combine parameters by name and values by identity, as tests share the values of one list."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    values = [(name, id(params[name])) for name in sorted(params)]
    return combinations(values, 1 if item.get_closest_marker("every_value") else 2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make a test that builds random weights independent of the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_address_beside_a_tensor() -> Iterator[None]:
    """Fail where a kernel accesses memory outside its tensors.

    On a GPU compute-sanitizer checks that.
    """
    if DEVICE != "cpu" or find_spec("triton") is None:
        yield
        return
    from specsim.correctness.faults.checks.memory import guarded

    with guarded() as guard:
        yield
    assert guard.first is None, guard.first


@pytest.fixture(autouse=True)
def _outputs_follow_their_schemas(monkeypatch) -> None:
    """Validate every JSON output that a test writes against the schema that it names."""
    from specsim.core import files

    write_whole = files.write_whole

    def validated(path: Path, data: bytes, name: str) -> None:
        value = json.loads(data) if data.startswith(b"{") else {}  # a picture, a table
        if "schema" in value:
            _validator(value["schema"].split("/")[1]).validate(value)
        write_whole(path, data, name)

    monkeypatch.setattr(files, "write_whole", validated)


@cache
def _validator(output: str) -> Any:
    from jsonschema import Draft202012Validator

    from specsim.cli.schema import document

    return Draft202012Validator(document(output))


@pytest.fixture
def in_ranks() -> Callable[..., list[Any]]:
    """Run a function of a rank group in two processes, or in `size`, and list what each returns."""
    if DEVICE != "cpu":
        pytest.skip("forked processes cannot use this one's GPU; `specsim diff --tensor-parallel 2` tests ranks there")
    from specsim.correctness.ranks import run_in_ranks

    return lambda work, size=2: run_in_ranks(partial(_guarded, work), size)


def _guarded(work: Callable[[Any], Any], ranks: Any) -> Any:
    """Fail in a rank's process too where a kernel accesses memory outside its tensors."""
    from specsim.correctness.faults.checks.memory import guarded

    with guarded() as guard:
        answer = work(ranks)
    assert guard.first is None, guard.first
    return answer


@pytest.fixture
def call(capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: (exit status, stdout, stderr)."""
    from specsim.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        return exit_info.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def device() -> str:
    """Choose the device on which the fast implementation is tested."""
    return DEVICE


# A GPU runs a launch's programs in no order, the interpreter in one; so a race appears as a difference in another
# order.
@pytest.fixture(params=["in order", "reversed"] if DEVICE == "cpu" else ["in no order"])
def program_order(request, monkeypatch) -> str:
    """Set the order in which the interpreter runs the programs of every launch."""
    if request.param == "reversed":
        from triton.runtime.interpreter import InterpreterBuilder

        in_order = InterpreterBuilder.set_grid_idx

        def reversed_order(builder, *index: int) -> None:
            in_order(builder, *(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reversed_order)
    return request.param


@pytest.fixture(scope="session")
def llama_of() -> Callable[..., Any]:
    """Make transformers' Llama of a shape and its tensors in float64; further fields go into its config."""
    return _llama


def _llama(model: Any, tensors: Mapping[str, torch.Tensor], **fields: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, head_dim=model.head_dim, rms_norm_eps=model.rms_norm_eps,
        num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters={"rope_theta": model.rope.theta, "rope_type": "default"}, **fields,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).double().eval()
    theirs.load_state_dict({name: tensor.double() for name, tensor in tensors.items()})
    return theirs


@pytest.fixture(scope="session")
def shuffled_pools():
    """Make pools with pages in random order, and a row for each request that owns `columns` columns."""
    from specsim.core.pool import KVBuffer, KVLayout, KVPool

    def make(page_size: int, columns: list[int], layout: KVLayout | None = None) -> tuple[KVPool, list[int]]:
        num_pages = sum(-(-count // page_size) for count in columns) + 3
        slots = num_pages * page_size
        buffers = [KVBuffer(layout or KVLayout(1, 1, 2), slots, torch.float64) for _ in range(2)]
        pools = KVPool(*buffers, page_size, num_pages, max(columns) + page_size)
        taken = [pools.open() for _ in range(num_pages)]
        for row in taken:
            pools.reserve(row, page_size)
        for index in torch.randperm(num_pages).tolist():
            pools.close(taken[index])
        rows = [pools.open() for _ in columns]
        for row, count in zip(rows, columns, strict=True):
            pools.reserve(row, count)
        return pools, rows

    return make
