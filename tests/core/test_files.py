"""Files are written completely, keep their mode, and are different from the command's other files."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specsim.core.errors import InputError
from specsim.core.files import check_files, write_json, write_whole


def test_concurrent_writers_use_different_temporary_files(tmp_path):
    def write(name: str) -> None:
        for _ in range(200):
            write_json(tmp_path / name, {"name": name})
            assert json.loads((tmp_path / name).read_text()) == {"name": name}

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(write, "abcd"))
    assert sorted(os.listdir(tmp_path)) == list("abcd")


def test_a_file_keeps_its_mode(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {})
    as_any_other = tmp_path / "other"
    as_any_other.touch()
    assert file.stat().st_mode == as_any_other.stat().st_mode
    file.chmod(0o640)
    write_json(file, {"more": 1})
    assert file.stat().st_mode & 0o777 == 0o640


def test_half_a_surrogate_pair_is_kept(tmp_path):
    write_json(tmp_path / "a.json", {"text": "\ud800é"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"text": "\ud800é"}


def test_a_file_is_none_of_the_others_by_another_name(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    check_files({"text": tmp_path / "file"}, json=None, plot=tmp_path / "other")
    check_files({"text": None}, json=None)
    with pytest.raises(InputError, check=lambda error: error.name == "json"):
        check_files({"text": tmp_path / "file"}, json=tmp_path / "link")


@pytest.mark.parametrize("path", ["", "missing/file", "pipe"])
def test_only_a_file_in_a_folder_can_be_written(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, check=lambda error: error.name == "plot"):
        check_files({}, plot=tmp_path / path)
    with pytest.raises(InputError, check=lambda error: error.name == "json"):
        write_json(tmp_path / path, {})
    assert (tmp_path / "pipe").is_fifo()


def test_standard_output_is_no_file_to_replace(tmp_path):
    code = (
        "from pathlib import Path; from specsim.core.files import check_writable; check_writable(Path('/dev/stdout'))"
    )
    with (tmp_path / "printed").open("w") as printed:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=printed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "InputError: json is '/dev/stdout'" in done.stderr


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_full_disk_names_the_file(tmp_path, monkeypatch, step):
    def fill(path: Path, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, step, fill)
    with pytest.raises(OSError, match="No space left", check=lambda error: error.filename == str(tmp_path / "a.png")):
        write_whole(tmp_path / "a.png", b"data")
    assert list(tmp_path.iterdir()) == []
