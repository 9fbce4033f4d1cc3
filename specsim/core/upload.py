"""Copies of host tensors to a GPU without waiting, for states, pools and the serving loop."""

import torch


def upload(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """Copy a tensor to a device, without waiting where that is a GPU.

    It is sent from pinned memory: a copy from ordinary memory would wait until the GPU has done all earlier work.
    """
    to_gpu = device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    if not to_gpu or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
