"""GPUs of hardware.csv and of users' files."""

import json
from pathlib import Path

import pytest

from specsim.core.errors import InputError
from specsim.simulator.hardware import hardware, names, read_hardware

GPU = {"name": "X1", "peak_flops": {"bfloat16": 1e14, "float8": 2e14}, "bandwidth": 1e12, "memory": 2**34}
GPU |= {"interconnect": 1e11, "source": "measured"}
ROWS = "X1,peak_flops_bfloat16,1e14\nX1,peak_flops_float8,2e14\nX1,bandwidth,1e12\nX1,memory,17179869184\n"
TABLE = "name,figure,value\n" + ROWS + "X1,interconnect,1e11\n"


@pytest.fixture
def file(tmp_path):
    def make(text: str, name: str = "gpus.csv") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return make


def test_a_file_of_either_format_describes_a_gpu(file):
    from_table, from_object = hardware(file(TABLE)), hardware(file(json.dumps(GPU), "gpus.json"))
    assert from_table == from_object
    assert (from_table.name, from_table.flops("float8"), from_table.memory) == ("X1", 2e14, 2**34)


def test_a_gpu_of_several_is_named_after_the_file(file):
    path = file(json.dumps([GPU, GPU | {"name": "X2", "bandwidth": 2e12}]), "two.json")
    assert hardware(f"{path}#X2").bandwidth == 2e12
    with pytest.raises(InputError, check=lambda error: error.allowed == f"{path}#X1 or {path}#X2"):
        hardware(path)


def test_the_shipped_table_is_such_a_file():
    shipped = read_hardware(Path(__file__).parents[2] / "specsim" / "simulator" / "hardware.csv")
    assert tuple(shipped) == names()
    assert all(shipped[name] == hardware(name) for name in names())


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        (TABLE.replace("1e12", "1,2e12"), "gpus.csv", "gpus.csv, line 4"),
        (TABLE.replace("interconnect", "link"), "gpus.csv", "gpus.csv, line 2"),
        (TABLE + "X1,memory,5\n", "gpus.csv", "gpus.csv, line 7"),
        (TABLE.replace("figure", "what"), "gpus.csv", "gpus.csv"),
        ("name,figure,value\n", "gpus.csv", "gpus.csv"),
        ("[{", "gpus.json", "gpus.json"),
        ("[{}]", "gpus.json", "gpus.json, GPU 1"),
        (json.dumps([GPU, GPU]), "gpus.json", "gpus.json, GPU 2"),
        (json.dumps(GPU | {"peak_flops": {"float64": 1e13}}), "gpus.json", "gpus.json, GPU 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(file, text, name, place):
    path = file(text, name)
    expected = str(Path(path).parent / place)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("hardware", expected)):
        hardware(path)


@pytest.mark.parametrize(
    ("text", "name", "field", "place"),
    [
        (TABLE.replace("1e12", "fast"), "gpus.csv", "value", "gpus.csv, line 4"),
        (TABLE.replace("2e14", "-1"), "gpus.csv", "value", "gpus.csv, line 3"),
        (json.dumps(GPU | {"memory": True}), "gpus.json", "memory", "gpus.json, GPU 1"),
        (json.dumps(GPU | {"memory": "8e10"}), "gpus.json", "memory", "gpus.json, GPU 1"),
    ],
)
def test_a_bad_number_is_named_with_its_line(file, text, name, field, place):
    with pytest.raises(InputError, check=lambda error: error.name == field and place in str(error)):
        hardware(file(text, name))
