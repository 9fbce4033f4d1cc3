"""Full disks, closed pipes, interrupts and too little memory: data kept, and messages."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specsim.cli.main import main

pytestmark = pytest.mark.usefixtures("shipped")
FEW = ("generate", "--max-new-tokens", "5")


@pytest.fixture
def filled(tmp_path, monkeypatch) -> list[Path]:
    """Fill the disks of these folders after a command has checked that it can write; temporary files are elsewhere."""
    folders = []
    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if path.parent not in folders or not any(data):
            return write_bytes(path, data)
        write_bytes(path, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return folders


@pytest.mark.parametrize("existing", [None, "old"])
def test_a_disk_that_fills_costs_no_result(call, tmp_path, filled, existing, assert_one_sentence):
    filled.append(tmp_path)
    file = tmp_path / "out.json"
    if existing:
        file.write_text(existing)
    status, out, err = call(*FEW, "--json", str(file))
    assert "accept length" in out, "the result is shown all the same"
    assert_one_sentence((status, "", err), "json")
    (kept,) = (tmp_path / "temporary").iterdir()
    assert err.endswith(f"; the result is in {kept}\n")
    assert json.loads(kept.read_text())["outputs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"] * bool(existing) + ["temporary"]
    assert not existing or file.read_text() == existing


def test_every_result_of_a_full_disk_is_rescued(call, tmp_path, filled):
    filled.append(tmp_path)
    status, _, err = call(*FEW, "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    assert status == 2
    assert {line.partition(" is ")[0] for line in err.splitlines()} == {"specsim: json", "specsim: html"}
    assert {path.suffix for path in (tmp_path / "temporary").iterdir()} == {".json", ".html"}


def test_json_is_printed_where_all_disks_are_full(call, tmp_path, filled, assert_one_sentence):
    filled += [tmp_path, tmp_path / "temporary"]
    status, out, err = call(*FEW, "--json", str(tmp_path / "out.json"))
    assert_one_sentence((status, "", err), "json")
    assert json.loads(out.splitlines()[-1])["outputs"]


def test_a_full_disk_is_found_before_the_run(call, tmp_path, monkeypatch, assert_one_sentence):
    def fill(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", lambda *_, **__: pytest.fail("ran"))
    assert_one_sentence(call(*FEW, "--json", str(tmp_path / "out.json")), "json")


def test_a_disk_that_a_picture_fills_is_told(call, tmp_path, filled, assert_one_sentence):
    pytest.importorskip("matplotlib")
    filled.append(tmp_path)
    file = tmp_path / "picture.png"
    status, out, err = call("simulate", "--requests", "5", "--plot", str(file))
    assert "simulated 5 requests" in out, "the result is shown all the same"
    assert_one_sentence((status, "", err), "plot")
    assert [path.suffix for path in (tmp_path / "temporary").iterdir()] == [".png"]


def test_names_from_files_do_not_reach_the_terminal_raw(call, tmp_path, assert_one_sentence):
    raw = "a\x1b[31m\nb"
    (tmp_path / raw).mkdir()
    result = call("generate", "--target", str(tmp_path / raw), "--drafter", "none")
    assert_one_sentence(result)
    assert r"a\x1b[31m\nb" in result[2]
    assert "\x1b" not in result[2]


def test_a_long_option_is_not_repeated(call, assert_one_sentence):
    for arguments in (("--score", "A" * 100_000), (f"--{'a' * 100_000}",)):
        result = call("generate", *arguments)
        assert_one_sentence(result)
        assert len(result[2]) < 2500


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_device(in_process, assert_one_sentence):
    with open("/dev/full", "w") as full:
        status, err = in_process("--version", stdout=full)
    assert_one_sentence((status, "", err), "standard output")


def test_closed_standard_output_does_not_cost_the_json(tiny, tmp_path):
    command = f"{sys.executable} -c 'from specsim.cli.main import main; main()' --version >&-"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).returncode == 0


def test_closed_pipe_is_quiet_and_does_not_cost_the_json(tmp_path, in_process):
    reader, writer = os.pipe()
    os.close(reader)
    status, err = in_process(*FEW, "--json", str(tmp_path / "out.json"), stdout=writer)
    os.close(writer)
    assert (status, err) == (141, "")
    assert json.loads((tmp_path / "out.json").read_text())["outputs"]


def test_an_interrupt_is_one_line(call, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", interrupt)
    assert call(*FEW) == (130, "", "specsim: interrupted\n")


def test_too_little_memory_is_told(call, monkeypatch, assert_one_sentence):
    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes")

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", fail)
    assert_one_sentence(call(*FEW), "not enough memory")


def test_errors_of_the_program_itself_are_not_hidden(monkeypatch):
    class Bug(Exception):
        pass

    def fail(*_, **__):
        raise Bug

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", fail)
    with pytest.raises(Bug):
        main(FEW)
