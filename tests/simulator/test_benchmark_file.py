"""Formats of vLLM's and SGLang's benchmarks, and CSV: small files as the tools write them."""

import json

import pytest

from specsim.core.errors import InputError
from specsim.simulator.calibration.benchmark_file import Context, read

from .client_files import BATCH, LATENCY, SGLANG, SGLANG_DRAFTS, SPEC, VLLM

NOTHING = Context()
LOADS = Context(num_steps=3, batch=8, prompt_tokens=512, output_tokens=128)


@pytest.fixture
def made(tmp_path):
    def write(value, context=NOTHING, name="result.json"):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return read(path, context)

    return write


def test_a_vllm_result_contains_its_setting(made):
    source, (cell,) = made(VLLM | SPEC)
    assert source.tool == "vllm bench serve"
    assert len(source.sha256) == 64
    assert (cell.config.num_steps, cell.batch, cell.accept_length) == (3, 16, 2.5)
    assert (cell.prompt_tokens, cell.output_tokens) == (256, 128)
    assert cell.figures == pytest.approx({"tokens_per_s": 768.0, "tpot_s": 0.0196, "ttft_s": 0.18})
    _, (plain,) = made(VLLM)
    assert plain.config.is_plain
    assert plain.accept_length == 1


def test_requests_in_flight_are_a_limit_or_a_mean(made):
    free = {name: value for name, value in SGLANG.items() if name != "max_concurrency"} | {"request_rate": 2.0}
    _, (cell,) = made(free, LOADS)
    assert cell.batch == 8  # as given
    _, (cell,) = made(free, Context(num_steps=3))
    assert cell.batch == 16  # the mean that the client measured
    with pytest.raises(InputError, check=lambda error: error.name == "batch"):
        made({name: value for name, value in VLLM.items() if name != "max_concurrency"})


def test_an_sglang_result_needs_its_steps_or_has_them(made):
    with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
        made(SGLANG)
    source, (cell,) = made(SGLANG, LOADS)
    assert source.tool == "sglang bench_serving"
    assert (cell.config.num_steps, cell.batch, cell.accept_length) == (3, 16, 2.5)
    info = SGLANG_DRAFTS | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
    _, (told,) = made(SGLANG | {"server_info": info}, LOADS)
    assert (told.config.topk, told.config.num_steps, told.config.num_draft_tokens) == (2, 3, 8)
    _, (plain,) = made(SGLANG | {"accept_length": None})
    assert plain.config.is_plain


def test_lines_of_one_batch_are_cells_of_decoding(made):
    plain = BATCH | {"acc_length": -1.0, "batch_size": 1}
    source, cells = made("\n".join(map(json.dumps, (BATCH, plain))), LOADS, "result.jsonl")
    assert source.tool == "sglang bench_one_batch_server"
    assert [cell.config.num_steps for cell in cells] == [3, 0]
    assert cells[0].figures == {"decode_tokens_per_s": 8 * 100 / 2.0}
    older = {name: value for name, value in BATCH.items() if name not in ("last_ttft", "acc_length")}
    _, (whole,) = made(older)
    assert whole.figures == {"tokens_per_s": 8 * 101 / 2.5}


def test_latency_and_throughput_need_what_they_lack(made):
    with pytest.raises(InputError, check=lambda error: error.name == "batch"):
        made(LATENCY)
    source, (cell,) = made(LATENCY, LOADS)
    assert (source.tool, cell.figures) == ("vllm bench latency", {"tokens_per_s": 8 * 128 / 2.0})
    assert cell.accept_length is None
    throughput = {"elapsed_time": 10.0, "num_requests": 100, "total_num_tokens": 64000, "requests_per_second": 10.0}
    source, (cell,) = made(throughput | {"tokens_per_second": 6400.0}, LOADS)
    assert (source.tool, cell.figures) == ("vllm bench throughput", {"tokens_per_s": 1280.0})


def test_a_table_has_a_cell_for_each_row(made):
    text = 'Batch_size,steps,topk,num_draft,throughput,acc_length\n1,plain,,,158.3,\n4,3,4,8,"1,447.9",2.86\n'
    source, cells = made(text, LOADS, "table.csv")
    assert (source.tool, source.cells) == ("CSV", 2)
    assert cells[0].config.is_plain
    assert (cells[1].config.topk, cells[1].config.num_draft_tokens, cells[1].accept_length) == (4, 8, 2.86)
    assert cells[1].figures == {"decode_tokens_per_s": 1447.9}


def test_clients_and_batches_are_different_loads(made):
    text = "{},num_steps,accept_length,tpot_ms,prompt_tokens,output_tokens\n16,2,2.1,8.0,100,50\n"
    _, (batch,) = made(text.format("batch"), name="a.csv")
    _, (clients,) = made(text.format("concurrency"), name="b.csv")
    assert batch.figures == {"decode_tokens_per_s": 2000.0}
    assert clients.figures == {"tpot_s": 0.008}
    assert (clients.prompt_tokens, clients.output_tokens) == (100, 50)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("steps,tokens_per_s\n1,2\n", "file"),
        ("batch,steps\n1,2\n", "file"),
        ("batch,num_steps,tokens_per_s\n", "file"),
        ("batch,num_steps,tokens_per_s\n4,1,fast\n", "tokens_per_s"),
        ("batch,num_steps,tokens_per_s\n,1,30\n", "batch"),
        ("batch,num_steps,tokens_per_s\n4,1,\n", "tokens_per_s"),
        ("batch,num_steps,accept_length,tokens_per_s\n4,1,2.5,30\n", "accept_length"),
        ("[1, 2]", "file"),
        ('{"a": 1}', "file"),
        ("{", "file"),
    ],
)
def test_what_is_no_benchmark_is_refused(made, text, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        made(text, LOADS)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("4,3,2,4,280,512,256", "file"),  # a decimal comma is one field more
        ("4,3,2.4,280,512", "file"),
        ('"1,5",3,2.4,280,512,256', "batch"),
        ("4.9,3,2.4,280,512,256", "batch"),
        ("4,0.9,2.4,280,512,256", "num_steps"),
        ("4,2000000000,2.4,280,512,256", "num_steps"),
        ("99999999999,3,2.4,280,512,256", "batch"),
        ('4,3,"2,4",280,512,256', "accept_length"),
        ("4,3,2.4,nan,512,256", "tokens_per_s"),
        ("4,3,2.4,280,512.5,256", "prompt_tokens"),
    ],
)
def test_a_bad_field_is_named_with_its_line(made, row, field):
    heading = "batch,num_steps,accept_length,tokens_per_s,prompt_tokens,output_tokens\n1,0,1,150,512,256\n"
    with pytest.raises(InputError, check=lambda error: error.name == field and "cells.csv, line 3" in str(error)):
        made(f"{heading}{row}\n", name="cells.csv")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (VLLM | {"completed": 4.9}, "completed"),
        (VLLM | {"max_concurrency": "many"}, "max_concurrency"),
        (BATCH | {"batch_size": 8.5}, "batch_size"),
        (BATCH | {"batch_size": 10**11}, "batch_size"),
        (BATCH | {"acc_length": "2.2"}, "acc_length"),
        (BATCH | {"last_ttft": "0.5"}, "last_ttft"),
        (SGLANG | {"server_info": {"speculative_num_steps": "3"}}, "speculative_num_steps"),
        (SGLANG | {"server_info": {"speculative_num_steps": 2**63}}, "speculative_num_steps"),
    ],
)
def test_a_bad_number_of_a_result_is_named(made, value, name):
    with pytest.raises(InputError, check=lambda error: error.name == name and "result.json" in str(error)):
        made(value, LOADS)
