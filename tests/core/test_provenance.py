"""A result names the code of its process."""

import sys

import torch

from specsim.core.code_digest import code_digests
from specsim.core.provenance import versions

KERNEL = "specsim.fast.persistent.kernel"  # which only a persistent forward imports


def test_digests_are_those_of_imported_modules_where_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    monkeypatch.setitem(sys.modules, "specsim.fast.tree", sys)
    every, imported = versions("cuda")["code"], versions("cuda", only_imported=True)["code"]
    assert every == code_digests()
    assert imported == {name: each for name, each in every.items() if name in sys.modules}
    assert KERNEL in every
    assert KERNEL not in imported
    assert imported["specsim.fast.tree"] == every["specsim.fast.tree"]
    assert "code" not in versions("cpu")
