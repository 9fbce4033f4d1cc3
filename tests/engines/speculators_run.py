"""Read heads with speculators' own classes, or save random ones: python speculators_run.py read|save FOLDER.

Runs in the engines' environment. `read` loads every head in the folder, and prints by name the class that read it and
the tensors that are not those of its file. `save` writes a head of each class into a folder of its own.
"""

import json
import sys
from pathlib import Path

import torch


def read(folder: Path) -> dict[str, dict]:
    """Load each head as speculators does."""
    from safetensors.torch import load_file
    from speculators import SpeculatorModel

    answers = {}
    for head in sorted(folder.iterdir()):
        model = SpeculatorModel.from_pretrained(str(head))
        state = model.state_dict()
        stored = load_file(head / "model.safetensors")
        answers[head.name] = {
            "class": type(model).__name__,
            "wrong": [name for name, tensor in stored.items() if not _same(state.get(name), tensor)],
            "unset": [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.isnan().any()],
        }
    return answers


def _same(tensor: torch.Tensor | None, stored: torch.Tensor) -> bool:
    return tensor is not None and tensor.dtype == stored.dtype and torch.equal(tensor, stored)


def save(folder: Path) -> dict[str, dict]:
    """Save random heads, for a Llama of six layers, and print their tensors' sums."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.models.peagle.core import PEagleDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    sizes = dict(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    eagle = dict(transformer_layer_config=LlamaConfig(**sizes), eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    block = dict(transformer_layer_config=Qwen3Config(**sizes), aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=0)
    models = {
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig, eagle),
        "p-eagle": (PEagleDraftModel, PEagleSpeculatorConfig, eagle | {"mask_token_id": 0}),
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, block),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig, block | {"markov_rank": 4}),
    }
    answers = {}
    for name, (model_class, config_class, fields) in models.items():
        methods = SpeculatorsConfig(
            algorithm=config_class.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        )
        torch.manual_seed(0)
        model = model_class(config_class(draft_vocab_size=48, speculators_config=methods, **fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(str(folder / name))
        answers[name] = {"tensors": len(model.state_dict())}
    return answers


if __name__ == "__main__":
    action, where = sys.argv[1:]
    print(json.dumps({"read": read, "save": save}[action](Path(where))))
