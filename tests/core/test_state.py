"""Uploads: the same values on the device, and no wait for a GPU."""

import pytest
import torch

from specsim.core.phases import PrefillInput
from specsim.core.state import upload

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's copies can wait")


def test_a_tensor_that_is_there_is_not_copied():
    tensor = torch.arange(5)
    assert upload(tensor, "cpu") is tensor
    assert upload(tensor, None) is tensor


def test_only_copies_to_a_gpu_are_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    sent = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking=False: sent.append(non_blocking))
    tensor = torch.arange(5)
    upload(tensor, "cpu")
    upload(tensor, "cuda")
    upload(tensor[:0], "cuda")  # nothing to pin
    assert len(pinned) == 1
    assert sent == [False, True, False]


def test_the_most_rows_are_known_without_the_device():
    prefill = PrefillInput.of_prompts([[1, 2], [3, 4, 5], [6]])
    assert prefill.max_rows == 3
    assert prefill.requests.tolist() == [0, 0, 1, 1, 1, 2]
    assert PrefillInput.of_prompts([]).max_rows == 0


@on_gpu
def test_an_upload_does_not_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = upload(torch.arange(5), "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == [0, 1, 2, 3, 4]
