"""Files are written completely, keep their mode, and are different from the command's other files."""

import errno
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specsim.core.errors import InputError
from specsim.core.files import Unwritten, check_writable, is_same_file, write_json, write_whole


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


def test_a_file_has_other_names(tmp_path):
    file, new = tmp_path / "file", tmp_path / "new"
    file.touch()
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "to_new").symlink_to(new)
    for other in (file, tmp_path / "link", tmp_path / "hard", tmp_path / "folder" / ".." / "file"):
        assert is_same_file(other, file)
        assert not is_same_file(other, new)
    assert is_same_file(tmp_path / "to_new", new)
    assert not is_same_file(file, tmp_path / ("a" * 300))


@pytest.mark.parametrize("path", ["", "missing/file", "pipe", "file/below", "a" * 300, "full", "to_full"])
def test_only_a_file_in_a_folder_can_be_written(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "to_full").symlink_to(tmp_path / "full")
    with pytest.raises(InputError, check=lambda error: error.name == "plot"):
        check_writable(tmp_path / path, "plot")
    with pytest.raises(Unwritten, check=lambda error: error.name == "json" and error.data == b"{}\n"):
        write_json(tmp_path / path, {})
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "pipe", "to_full"]


def test_a_check_leaves_the_folder_as_it_is(tmp_path):
    (tmp_path / "file").write_text("before")
    for name in ("file", "new"):
        check_writable(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


@pytest.mark.parametrize("name", ["/dev/stdout", "printed", "/dev/stderr", "told"])
def test_a_file_of_the_streams_is_not_replaced(tmp_path, name):
    code = f"from pathlib import Path; from specsim.core.files import check_writable; check_writable(Path({name!r}))"
    with (tmp_path / "printed").open("w") as out, (tmp_path / "told").open("w") as err:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=err, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert f"InputError: json is '{name}'" in (tmp_path / "told").read_text()


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_full_disk_names_the_file_and_keeps_the_data(tmp_path, monkeypatch, step):
    def fill(path: Path, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, step, fill)
    with pytest.raises(Unwritten, match="No space left") as raised:
        write_whole(tmp_path / "a.png", b"data", "plot")
    error = raised.value
    assert (error.name, error.value, error.data) == ("plot", str(tmp_path / "a.png"), b"data")
    assert list(tmp_path.iterdir()) == []
    same = pickle.loads(pickle.dumps(error))
    assert (type(same), str(same)) == (Unwritten, str(error))


def test_a_write_that_stops_keeps_the_file_before(tmp_path):
    """Files of the process may have 10,000 bytes, as on a full disk; it writes no bytecode."""
    code = (
        "import resource, sys; from pathlib import Path; from specsim.core.files import write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "write_whole(Path('a'), bytes(9_000), 'out'); write_whole(Path('a'), bytes(11_000), 'out')"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Unwritten: out is 'a'" in done.stderr
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").stat().st_size == 9_000
