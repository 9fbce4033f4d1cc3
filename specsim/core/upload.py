"""Copies of host tensors to a GPU for which the host does not wait, made by states, pools and the serving loop."""

import torch


def upload(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """Copy a tensor to a device; from the host to a GPU the copy is enqueued, through memory that pages never leave.

    A copy from ordinary memory would wait until the GPU has done all work before it.
    """
    to_gpu = device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    if not to_gpu or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
