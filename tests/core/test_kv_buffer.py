"""KV in fp8: rounded once when it is written, moved as it is, and read times its scale."""

import pytest
import torch

from specsim.core.errors import InputError
from specsim.core.kv_buffer import FP8, KVBuffer, KVFormat, KVLayout

LAYOUT = KVLayout(2, 1, 4)
SCALED = KVFormat("fp8_e4m3", 0.5, 2.0)


def filled(layout: KVLayout, stored_as: KVFormat, dtype: torch.dtype = torch.float32) -> KVBuffer:
    kv = KVBuffer(layout, 6, dtype, stored_as=stored_as)
    for buffer in (kv.keys, kv.values):
        buffer.fill_(0)
    return kv


def test_fp8_numbers_are_divided_by_their_scales_and_clamped():
    kv = filled(LAYOUT, SCALED)
    rows = torch.tensor([[1.0, -3.3, 0.01, 1000.0]])[:, None]
    kv.write(1, torch.tensor([3, -1]), rows.expand(2, 1, 4), rows.expand(2, 1, 4))
    keys, values = kv.read(1, torch.tensor([3]), torch.float64)
    assert keys.flatten().tolist() == [1.0, -3.25, 0.009765625, 224.0]
    assert values.flatten().tolist() == [1.0, -3.25, 0.01171875, 896.0]
    assert kv.keys.dtype == kv.values.dtype == FP8
    assert kv.is_fp8


def test_moved_fp8_keeps_its_bytes():
    kv = filled(LAYOUT, SCALED)
    kv.write(0, torch.tensor([2]), torch.randn(1, 1, 4), torch.randn(1, 1, 4))
    kv.move(torch.tensor([2]), torch.tensor([5]))
    for buffer in (kv.keys, kv.values):
        raw = buffer.view(torch.uint8)
        assert torch.equal(raw[:, 5], raw[:, 2])


def test_values_in_keys_have_the_keys_scale():
    kv = filled(KVLayout(2, 1, 6, 4, values_in_keys=True), SCALED)
    kv.write(0, torch.tensor([1]), torch.ones(1, 1, 6), torch.zeros(1, 1, 4))
    keys, values = kv.read(0, torch.tensor([1]), torch.float32)
    assert torch.equal(values, keys[..., :4])
    assert (keys == 1).all()


def test_the_models_type_is_read_as_written():
    kv = filled(LAYOUT, KVFormat(), torch.float64)
    rows = torch.randn(1, 1, 4, dtype=torch.float64)
    kv.write(0, torch.tensor([1]), rows, rows)
    assert torch.equal(kv.read(0, torch.tensor([1]), torch.float64)[0], rows)


@pytest.mark.parametrize(
    "arguments", [("fp4",), ("fp8_e4m3", 0.0), ("fp8_e4m3", 1.0, float("nan")), ("model", 2.0), ("fp8_e4m3", "1")]
)
def test_formats_that_do_not_exist_are_refused(arguments):
    with pytest.raises(InputError, match="allowed"):
        KVFormat(*arguments)
