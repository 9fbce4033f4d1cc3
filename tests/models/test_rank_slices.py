"""Slices of a checkpoint, as one rank reads them."""

import pytest
import torch
from safetensors.torch import save_file

from specsim import InputError, load
from specsim.core.rank_part import DRAFTER_TABLES, TABLES, RankPart
from specsim.models.load import Parts


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_slices_that_are_read_are_those_of_the_whole(drafter):
    whole = load(drafter=drafter)
    for rank in range(2):
        part = RankPart(rank, 2)
        own = load(drafter=drafter, parts=Parts(part, part))
        for checkpoint, whole_one, tables in (
            (own.target, whole.target, TABLES),
            (own.checkpoint, whole.checkpoint, DRAFTER_TABLES),
        ):
            expected = part.tensors(whole_one.tensors, tables)
            assert expected.keys() == checkpoint.tensors_of(part).keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())


def test_no_slice_keeps_the_memory_of_a_whole_tensor():
    """Tensors that a rank reads have no more memory than its slices."""
    part = RankPart(0, 2)
    own = load(drafter="eagle3", parts=Parts(part, part)).target
    for tensor in own.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_slices_of_another_rank_raise():
    pair = load(drafter="none", parts=Parts(RankPart(0, 2)))
    with pytest.raises(InputError, check=lambda error: error.name == "pair"):
        pair.target.tensors_of(RankPart(1, 2))


def test_a_pickle_has_no_slices(tmp_path):
    from specsim.models.checkpoint.weights import Slices, read_weights

    torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError):
        read_weights(tmp_path, Slices(RankPart(0, 2), TABLES))


def test_a_slice_with_a_value_that_is_not_finite_raises(tmp_path):
    from specsim.models.checkpoint.weights import Slices, by_name, check_layout, read_weights

    tensor = torch.zeros(4, 6)
    tensor[3, 5] = torch.nan
    save_file({"o_proj.weight": tensor}, tmp_path / "model.safetensors")
    layout = {"o_proj.weight": (4, 6)}
    for rank in range(2):
        named = by_name(read_weights(tmp_path, Slices(RankPart(rank, 2), TABLES)), str)
        if rank == 0:
            assert check_layout(named, tmp_path, layout, {})["o_proj.weight"].shape == (4, 3)
        else:
            with pytest.raises(InputError):
                check_layout(named, tmp_path, layout, {})
