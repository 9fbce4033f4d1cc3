"""Modules of files: executed once, and again when the file's content has changed."""

import os

from specsim.core.user_module import load_module


def test_a_file_of_the_same_time_is_executed_again(tmp_path):
    path = tmp_path / "specsim_test_rule.py"
    for value in (1, 2):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (0, 0))
        assert value == load_module(str(path)).VALUE
        assert load_module(str(path)) is load_module(str(path))
