"""The simulator's expectation of rounds on several GPUs, for the GPU of this machine."""

from typing import Any, NamedTuple

import numpy as np
import torch

from specsim.core.config import SpecConfig
from specsim.core.target import ModelConfig
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware, names
from specsim.simulator.model import Model


class Expected(NamedTuple):
    """A round on several GPUs, without the host."""

    ratio: float  # of its time and of that on one GPU
    exchanges: float  # seconds between GPUs
    share: float  # of them


def expected(
    config: ModelConfig, draft_vocab_size: int, size: int, requests: int, tree: SpecConfig, seq_len: int
) -> Expected | None:
    """Compute the expectation of EAGLE-3 with the default parameters; None for a GPU without figures."""
    own = this_gpu()
    if own is None:
        return None
    target = shape_of(config)
    head = drafter("eagle3", target, draft_vocab_size)
    alone, shared = (CostModel(own, target, head, tensor_parallel=count) for count in (1, size))
    contexts = np.full(requests, seq_len)
    phases = [cost.phases(contexts, tree) for cost in (alone, shared)]
    seconds = [each.draft + each.verify + each.extend for each in phases]
    exchanges = shared.exchanges(requests, tree)
    return Expected(seconds[1] / seconds[0], exchanges, exchanges / seconds[1])


def expected_exchange(size: int, nbytes: int) -> float | None:
    """Compute the seconds of one sum over GPUs; None for a GPU without figures."""
    own = this_gpu()
    if own is None:
        return None
    from specsim.simulator.forward import Forward

    return Forward(own, model("llama-3-8b"), Efficiency(), size).exchange(nbytes)


def this_gpu() -> Hardware | None:
    """Find this machine's GPU in the simulator's table."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().upper().split()
    found = [name for name in names() if name.upper() in words]
    return hardware(found[0]) if len(found) == 1 else None


def shape_of(config: ModelConfig) -> Model:
    """Describe a dense model of heads to the simulator."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return model(fields)
