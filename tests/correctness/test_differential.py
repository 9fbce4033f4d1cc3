"""The differential passes what is right, and names every single fault."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

import specsim.correctness.differential.grid_run as running
from specsim.cli.main import main
from specsim.core.columns import lane_columns, tail_columns
from specsim.core.phases import (
    Candidates,
    DraftExtendInput,
    DraftInput,
    PrefillOutput,
    Verdict,
    VerifyInput,
    VerifyOutput,
)
from specsim.correctness.differential import check, grid
from specsim.correctness.differential.grid_run import rehearse
from specsim.correctness.differential.grids import (
    QUICK,
    SAMPLINGS,
    SHIPPED,
    SPECIAL,
    VERIFIERS,
    cell_of,
)
from specsim.correctness.differential.lockstep import _same_bits
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine

CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
WARM = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3"))
COVERING = grid("pairwise")
# The pairwise grid in full is a step of .ci/run.
FEW = tuple({each.id: each for each in map(cell_of, (*QUICK, *SPECIAL[::2], *VERIFIERS, *SHIPPED))}.values())


BUDGETS = {}


@pytest.fixture(autouse=True)
def _rehearsed_once(monkeypatch):
    """A cell's budgets are worked out once: faults of the column under test have no part in them."""

    def rehearsed(cell, pair, dtype):
        name = repr((cell, dtype))
        if name not in BUDGETS:
            BUDGETS[name] = rehearse(cell, pair, dtype)
        return dict(BUDGETS[name])

    monkeypatch.setattr(running, "rehearse", rehearsed)


# What is right passes.


@pytest.mark.parametrize("cell", COVERING[::8], ids=lambda cell: cell.id)
def test_the_reference_equals_itself(cell):
    result = check(cell, "reference")
    assert (result.mismatches, result.undecidable, result.first_divergence) == (0, 0, None)
    assert not result.is_empty
    assert result.left_out == {}


@pytest.mark.parametrize("cell", [CELL, WARM, cell_of(QUICK[7]), cell_of(QUICK[2])], ids=lambda cell: cell.id)
def test_bfloat16_gives_undecidable_choices_and_no_mismatch(cell):
    """16 bits part the reference from its float64 self; whom they part is left out, and counted."""
    result = check(cell, "reference", "bfloat16")
    assert result.mismatches == 0
    assert result.undecidable > 0
    assert sum(result.left_out.values()) >= result.undecidable
    assert not result.is_empty


@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.id)
def test_fast_equals_reference(cell):
    """On a machine with a GPU it runs there."""
    result = check(cell)
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert not result.is_empty
    assert result.undecidable <= 1


# What is wrong is found, and named.


class Faulty:
    """An engine whose output or pools are spoiled in one phase, in its first round."""

    def __init__(self, engine, phase, spoil):
        self._engine, self._phase, self._spoil = engine, phase, spoil

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        if name != self._phase:
            return found

        def run(batch, state, pools):
            output = found(batch, state, pools)
            return self._spoil(output, batch, pools) or output

        return run


def result_of(cell, phase, spoil, dtype="float32"):
    wrap = lambda column: replace(column, engine=Faulty(column.engine, phase, spoil))  # noqa: E731
    return check(cell, "reference", dtype, wrap=wrap)


def changed(value: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    value = value.clone()
    if value.dtype == torch.bool:
        value[place] = ~value[place]
    elif value.is_floating_point():
        value[place] = value[place] * 1.001 + 1e-3
    else:
        value[place] += 1
    return value


def spoiler(path: str, place: tuple[int, ...]):
    """Change one entry of a field, given by its path from the state."""

    def spoil(state, batch, pools):
        name, _, rest = path.partition(".")
        value = getattr(state, name)
        new = spoiler(rest, place)(value, batch, pools) if rest else changed(value, place)
        return replace(state, **{name: new})

    return spoil


NOT_COMPARED = {"draft_logits", "draft_prob"}  # the reference's alone, and what deterministic drafts have not
NESTED = {
    "candidates": Candidates,
    "verdict": Verdict,
    "draft_extend_input": DraftExtendInput,
    "draft_input": DraftInput,
}
STATES = {"prefill": PrefillOutput, "draft": VerifyInput, "verify": VerifyOutput, "draft_extend": DraftInput}


def paths(state) -> list[str]:
    """Every tensor of a state, from its definition: a field that is added later is planted too."""
    found = []
    for name in (field.name for field in fields(state)):
        below = paths(NESTED[name]) if name in NESTED else []
        found += [f"{name}.{path}" for path in below] or ([] if name in NOT_COMPARED else [name])
    return found


FAULTS = [(phase, path) for phase, state in STATES.items() for path in paths(state)]
# Elsewhere than at a state's very first entry.
PLACES = {"candidates.parent_list": (1, 6), "candidates.tokens": (1, 5), "candidates.scores": (1, 9)}


def first_entry(path: str):
    """Spoil the entry at PLACES, or the very first one."""

    def spoil(state, batch, pools):
        value = state
        for name in path.split("."):
            value = getattr(value, name)
        return spoiler(path, PLACES.get(path, (0,) * value.dim()))(state, batch, pools)

    return spoil


@pytest.mark.parametrize("cell", [CELL, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("phase", "path"), FAULTS)
def test_one_wrong_entry_of_any_field_is_named(cell, phase, path):
    result = result_of(cell, phase, first_entry(path))
    assert result.first_divergence is not None, f"{path} is not compared"
    assert result.first_divergence.field == path.removeprefix("verdict.")
    assert result.first_divergence.phase == phase
    assert result.mismatches >= 1


LANES = cell_of(
    dict(
        topk=2, num_steps=2, page_size=4, batch=1, sampling="warm", kind="eagle3", verifier="multi_round", graph="phase"
    )
)


@pytest.mark.parametrize(
    ("phase", "path"),
    [
        ("prefill", "draft_input.draft_prob"),
        ("prefill", "draft_input.topk_index"),
        ("draft", "draft_prob"),
        ("draft", "candidates.tokens"),
        ("draft", "candidates.scores"),
        ("verify", "verdict.predict"),
        ("verify", "verdict.accept_index"),
        ("draft_extend", "draft_prob"),
        ("draft_extend", "topk_index"),
        ("draft_extend", "topk_p"),
    ],
)
def test_one_wrong_entry_of_sampled_drafts_is_named(phase, path):
    place = (0,) if path == "verdict.predict" else (0, 0, 0) if (phase, path) == ("draft", "draft_prob") else (0, 0)
    first = result_of(LANES, phase, spoiler(path, place)).first_divergence
    assert (first.phase, first.field) == (phase, path.removeprefix("verdict."))


def other_verifier(name: str):
    """A column that verifies as another verifier would."""

    class Other(Faulty):
        def __init__(self, engine):
            super().__init__(engine, "none", None)

        def verify(self, batch, state, pools):
            engine = self._engine
            own, engine.config = engine.config, replace(engine.config, verifier=name)
            try:
                return engine.verify(batch, state, pools)
            finally:
                engine.config = own

    return lambda column: replace(column, engine=Other(column.engine))


@pytest.mark.parametrize(
    ("right", "wrong"), [("rejection", "target_only"), ("block", "rejection"), ("rejection", "block")]
)
def test_a_column_that_verifies_otherwise_is_found(right, wrong):
    setting = dict(topk=1, num_steps=3, page_size=4, batch=3, sampling="warm", verifier=right)
    found = check(replace(cell_of(setting), rounds=6), "reference", wrap=other_verifier(wrong)).first_divergence
    assert found.phase == "verify"
    assert found.field in ("accept_index", "predict")


def in_round(phase, spoil):
    """The same fault where the three phases are one step."""

    def spoil_round(outputs, batch, pools):
        name = {"draft": "verify_input", "verify": "verify_output", "draft_extend": "draft_input"}[phase]
        return outputs._replace(**{name: spoil(getattr(outputs, name), batch, pools)})

    return spoil_round


@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize(("phase", "path"), [fault for fault in FAULTS if fault[0] != "prefill"])
def test_one_wrong_entry_is_named_after_a_whole_round(mode, phase, path):
    cell = replace(WARM, graph="round", mode=mode)
    first = result_of(cell, "round", in_round(phase, first_entry(path))).first_divergence
    assert first is not None
    assert (first.phase, first.field) == (phase, path.removeprefix("verdict."))


def slot_of(batch, pools, column, request=1):
    return int(pools.req_to_token[batch.req_pool_indices[request], column])


def touch(buffer, name, column_of):
    """Spoil the KV of one column of request 1, in the last layer."""

    def spoil(output, batch, pools):
        length = int(batch.seq_lens[1])
        slot = slot_of(batch, pools, column_of(length))
        getattr(getattr(pools, buffer), name)[-1, slot, -1, -1] += 1e-3

    return spoil


def lane(length):
    return int(lane_columns(length, CELL.config)[2, 1])


def tail(length):
    columns = tail_columns(length, CELL.config)
    return int(columns[3, -1]) if columns.numel() else lane(length)


KV_WRITES = {
    "a prompt's KV": ("prefill", "target", lambda length: 0),
    "the prompt's last KV": ("prefill", "draft", lambda length: length - 1),
    "a lane": ("draft", "draft", lane),
    "a tail's copy": ("draft", "draft", tail),
    "the root's KV": ("verify", "target", lambda length: length),
    "the prefix in verify": ("verify", "target", lambda length: length - 1),
    "the prefix in draft-extend": ("draft_extend", "draft", lambda length: length - 1),
    "an accepted row": ("draft_extend", "draft", lambda length: length),
}
STRAY = {
    "verify writes to the draft pool": ("verify", "draft", lambda length: length),
    "verify writes behind the tree": ("verify", "target", lambda length: length + 8),
    "draft writes to the target pool": ("draft", "target", lambda length: length),
    "draft writes to the prefix": ("draft", "draft", lambda length: 0),
    "draft-extend writes to the target pool": ("draft_extend", "target", lambda length: length),
    "draft-extend writes behind its rows": ("draft_extend", "draft", lambda length: length + 4),
}


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(("phase", "buffer", "column_of"), KV_WRITES.values(), ids=KV_WRITES)
def test_wrong_kv_is_named(phase, buffer, column_of, name):
    first = result_of(CELL, phase, touch(buffer, name, column_of)).first_divergence
    assert (first.phase, first.field, first.request) == (phase, f"{buffer} {name}", 1)


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(("phase", "buffer", "column_of"), STRAY.values(), ids=STRAY)
def test_a_stray_write_is_named_with_its_owner(phase, buffer, column_of, name):
    """Where unwritten KV is not a number, adding to it changes no bit: the slot is set."""

    def spoil(output, batch, pools):
        slot = slot_of(batch, pools, column_of(int(batch.seq_lens[1])))
        getattr(getattr(pools, buffer), name)[0, slot, 0, 0] = 7.0

    first = result_of(CELL, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, f"stray write, {buffer} pool")
    assert f"(request row 1, column {column_of(8)}, token " in first.fast


def record_elsewhere(output, batch, pools):
    pools.token_ids[batch.req_pool_indices[0], int(batch.seq_lens[0]) + 7] = 3


def swap_slots(output, batch, pools):
    row = batch.req_pool_indices[2]
    pools.req_to_token[row, [0, 1]] = pools.req_to_token[row, [1, 0]]


def lose_a_page(output, batch, pools):
    pools._allocator.allocate(1)


def give_a_page_twice(output, batch, pools):
    pools._allocator._free.append(pools._allocator.free_pages()[0])


@pytest.mark.parametrize("phase", ["prefill", "draft", "verify", "draft_extend"])
@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("token_ids", record_elsewhere),
        ("req_to_token", swap_slots),
        ("page books", lose_a_page),
        ("page books", give_a_page_twice),
    ],
)
def test_wrong_tables_and_books_are_named(phase, field, spoil):
    first = result_of(CELL, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, field)


def swapped(name, one, other, dim=1):
    def spoil(state, batch, pools):
        order = list(range(getattr(state, name).shape[dim]))
        order[one], order[other] = order[other], order[one]
        return replace(state, **{name: getattr(state, name).index_select(dim, torch.tensor(order))})

    return spoil


def leak_padding(state, batch, pools):
    return replace(state, topk_p=torch.cat([state.topk_p, state.topk_p[:1]]))


def narrow(state, batch, pools):
    return replace(state, draft_tokens=state.draft_tokens.int())


def lose(state, batch, pools):
    return replace(state, hidden=None)


def not_a_number(state, batch, pools):
    return replace(state, target_logits=state.target_logits.index_fill(0, torch.tensor([3]), torch.nan))


def accept_less(state, batch, pools):
    """Everything in agreement with itself, one draft short: request 0's path ends at its root."""
    if int(state.verdict.num_accepted_drafts[0]) == 0:
        return None
    accept_index, predict = state.verdict.accept_index.clone(), state.verdict.predict.clone()
    predict[accept_index[0, 1:][accept_index[0, 1:] >= 0].long()] = -1
    accept_index[0, 1:] = -1
    drafts = state.verdict.num_accepted_drafts.index_fill(0, torch.tensor([0]), 0)
    counts = {"num_accepted_drafts": drafts, "num_accepted_tokens": drafts + 1}
    verdict = replace(state.verdict, accept_index=accept_index, predict=predict, **counts)
    return replace(state, verdict=verdict)


def raise_error(state, batch, pools):
    raise IndexError("row 1 of the request table owns no slot")


SEMANTIC = {
    "two drafts change places": ("draft_extend", swapped("topk_index", 0, 1), "topk_index"),
    "two nodes change places": ("draft", swapped("draft_tokens", 1, 2), "draft_tokens"),
    "a padded row leaks": ("draft_extend", leak_padding, "topk_p (shape)"),
    "a narrower type": ("draft", narrow, "draft_tokens (dtype)"),
    "a lost field": ("draft_extend", lose, "hidden (type)"),
    "not a number": ("verify", not_a_number, "target_logits"),
    "a path cut short": ("verify", accept_less, "accept_index"),
    "an error": ("draft", raise_error, "error"),
}


@pytest.mark.parametrize(("phase", "spoil", "field"), SEMANTIC.values(), ids=SEMANTIC)
@pytest.mark.parametrize("cell", [CELL, WARM], ids=["greedy", "warm"])
def test_faults_of_meaning_are_named(cell, phase, spoil, field):
    first = result_of(cell, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, field)


def test_a_column_that_writes_to_what_it_reads_is_caught():
    class Writing(Faulty):
        def draft(self, batch, state, pools):
            output = self._engine.draft(batch, state, pools)
            state.topk_p[0, 0] = 0.5
            return output

    result = check(CELL, "reference", wrap=lambda column: replace(column, engine=Writing(column.engine, "", None)))
    assert result.first_divergence.field == "the state that it read"


def test_a_column_that_changes_what_it_left_before_is_caught():
    left = []

    def spoil(state, batch, pools):
        left.append(state)

    class Aliasing(Faulty):
        def draft_extend(self, batch, state, pools):
            left[0].target_logits.zero_()
            return self._engine.draft_extend(batch, state, pools)

    def wrap(column):
        return replace(column, engine=Aliasing(column.engine, "verify", spoil))

    assert check(CELL, "reference", wrap=wrap).first_divergence.field == "a state that it had left before"


def test_a_divergence_says_everything_in_words():
    first = result_of(CELL, "draft", first_entry("positions")).first_divergence
    assert (first.round, first.request, first.node) == (1, 0, 0)
    assert str(first) == f"{CELL.id}: round 1, draft, request 0, entry 0: positions is 8, the reference has 7"


SETTINGS = [
    dict(draft_kv="ancestor"),
    dict(score="logprob"),
    dict(penalties="relaxed"),
    dict(threshold_single=0.3),
    dict(threshold_acc=0.8),
    dict(extend="ragged"),
    dict(release="round"),
    dict(max_len=14),
]


@pytest.mark.parametrize("graph", ["eager", "round"])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_a_column_that_runs_another_setting_is_found(changes, graph):
    """None of these says it in a field: it shows in what the column computes."""
    setting = dict(topk=4, num_steps=4, num_draft_tokens=16, page_size=4, batch=3, sampling="biased")
    cell = cell_of(setting | {"graph": graph, "threshold_acc": 0.6 if "threshold_acc" in changes else 1.0})

    def wrap(column):
        return replace(column, engine=load_engine(make_pair(cell.pair), replace(cell.config, **changes)))

    assert check(cell, "reference", wrap=wrap).mismatches > 0


def with_sampling(**changes):
    def change(batch):
        sampling = {name: getattr(batch.sampling, name) * factor for name, factor in changes.items()}
        return replace(batch, sampling=replace(batch.sampling, **sampling))

    return change


BATCHES = {
    "seeds": lambda batch: replace(batch, seeds=batch.seeds + 1),
    "request ids": lambda batch: replace(batch, request_ids=batch.request_ids.flip(0)),
    "prompt lengths": lambda batch: replace(batch, prompt_lens=batch.prompt_lens + 1),
    **{
        name: with_sampling(**{name: factor})
        for name, factor in {
            "temperature": 1.001, "top_k": 0, "top_p": 0.7, "min_p": 3, "repetition_penalty": 1.001,
            "presence_penalty": 1.01, "frequency_penalty": 1.01, "logit_bias": 1.01,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("change", BATCHES.values(), ids=BATCHES)
def test_a_column_that_reads_the_batch_wrongly_is_found(change):
    """Every parameter is on; the same answer by luck in every round is what seven tokens a request exclude."""
    everything = replace(
        SAMPLINGS["biased"], top_k=6, top_p=0.8, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5,
        temperature=1.3, max_new_tokens=24,
    )  # fmt: skip
    cell = replace(CELL, sampling=(everything,) * 3, rounds=12)

    class Misreading(Faulty):
        def __getattr__(self, name):
            found = getattr(self._engine, name)
            if name not in ("prefill", "draft", "verify", "draft_extend"):
                return found
            return lambda batch, state, pools: found(change(batch), state, pools)

    result = check(cell, "reference", wrap=lambda column: replace(column, engine=Misreading(column.engine, "", None)))
    assert result.mismatches > 0


MODELS = {
    "a window one too wide": lambda config: dict(sliding_windows=tuple(w + 1 for w in config.sliding_windows)),
    "no window": lambda config: dict(sliding_windows=()),
    "an epsilon": lambda config: dict(rms_norm_eps=1e-2),
    "a rotary base": lambda config: dict(rope_theta=10001.0),
}


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_a_column_with_another_model_is_found(change, part):
    """Most of these turn no token."""
    cell = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, family="mistral"))
    pair = make_pair(cell.pair, torch.float32)
    if part == "target":
        other = replace(pair.target, config=replace(pair.target.config, **change(pair.target.config)))
    else:
        model = pair.drafter.config.model
        config = replace(pair.drafter.config, model=replace(model, **change(model)))
        other = replace(pair.drafter, config=config)
    engine = load_engine(replace(pair, **{part: other}), cell.config)
    assert check(cell, "reference", wrap=lambda column: replace(column, engine=engine)).mismatches > 0


NEAR_TWINS = cell_of(dict(topk=8, num_steps=3, num_draft_tokens=16, page_size=4, batch=3))


@pytest.fixture
def near_twins(monkeypatch):
    """Logits of some tokens and of the one after them differ by less than float32 can tell."""

    def make(name, dtype):
        pair = make_pair(name, dtype)
        head = pair.target.tensors["lm_head.weight"].clone()
        head[[9, 17, 33]] = head[[8, 16, 32]] * (1 + 2e-7)
        return replace(pair, target=replace(pair.target, tensors={**pair.target.tensors, "lm_head.weight": head}))

    monkeypatch.setattr(running, "make_pair", make)


@pytest.mark.parametrize("path", ["positions", "mask", "draft_tokens", "scores"])
def test_undecidable_choices_hide_nothing_else(near_twins, path):
    found = result_of(NEAR_TWINS, "draft", first_entry(path))
    assert found.first_divergence.field == path


@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize("graph", ["eager", "round"])
def test_columns_that_rounding_parted_come_back_together(near_twins, mode, graph):
    result = check(replace(NEAR_TWINS, mode=mode, graph=graph, rounds=6), "reference")
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert result.undecidable > 0
    assert sum(result.left_out.values()) >= result.undecidable
    assert result.exercised["rounds"] > 3


def test_quick_grid_compares_every_field_of_every_state():
    counts = Counter()
    for cell in grid("quick"):
        counts.update(check(cell, "reference").fields)
    expected = {path.removeprefix("verdict.") for _, path in FAULTS}
    assert expected <= {name for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("verifier", "topk"), [("target_only", 4), ("typical", 4), ("multi_round", 4), ("rejection", 1), ("block", 1)]
)
def test_the_oracle_sees_what_columns_share(verifier, topk, monkeypatch):
    """Uniforms of another stream in both columns are the same uniforms; the oracle draws by name."""
    import specsim.reference.verify as shared
    from specsim.core.uniforms import Stream, named_uniforms

    cell = cell_of(
        dict(topk=topk, num_steps=3, page_size=4, batch=3, sampling="warm", kind="eagle3", verifier=verifier)
    )
    pair = make_pair(cell.pair)
    assert compare_with_oracle(cell, pair) == []
    monkeypatch.setattr(
        shared, "final_uniforms", lambda *names: named_uniforms(*names[:2], Stream.PREFILL, names[2], 0)
    )
    assert {each.phase for each in compare_with_oracle(cell, pair)} == {"oracle against reference"}


def test_a_state_overwritten_with_what_compares_as_equal_is_seen():
    zeros = torch.zeros(2)
    assert not _same_bits(zeros, torch.tensor([0.0, torch.nan]))
    assert _same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


@pytest.fixture
def call(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(("diff", *arguments))
        return exit_info.value.code, *capsys.readouterr()

    return call


def test_diff_fails_on_a_mismatch_and_says_where(call, monkeypatch):
    monkeypatch.setattr(running, "check", lambda cell, *rest: result_of(cell, "draft", first_entry("positions")))
    status, out, _ = call("--impl", "reference")
    assert status == 1
    assert "First divergence: " in out
    assert "positions is 16" in out
    assert "Not shown to be equal: " in out
