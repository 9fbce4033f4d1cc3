"""Read heads with speculators' own classes, or save and run random ones: python speculators_run.py ACTION FOLDER.

Runs in the engines' environment. `read` loads every head in the folder, and prints by name the class that read it and
the tensors that are not those of its file. `save` writes a head of each class into a folder of its own. `run` computes
the drafts' logits of each of them after the prompt of scene.safetensors, in float64, as its training does.
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
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    windows = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16, use_sliding_window=True)
    qwen = Qwen3Config(**sizes, **windows)
    eagle = dict(transformer_layer_config=LlamaConfig(**sizes), eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    block = dict(transformer_layer_config=qwen, aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=0)
    models = {
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig, eagle | {"transformer_layer_config": qwen}),
        "p-eagle": (PEagleDraftModel, PEagleSpeculatorConfig, eagle | {"mask_token_id": 0}),
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, block | {"block_size": NUM_DRAFTS + 1}),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig, block | {"block_size": NUM_DRAFTS, "markov_rank": 4}),
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
            torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(str(folder / name))
        answers[name] = {"tensors": len(model.state_dict())}
    return answers


def run(folder: Path) -> dict[str, dict]:
    """Write the logits of each head's drafts into FOLDER/KIND.safetensors."""
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel
    from speculators.models.eagle3.core import Eagle3DraftModel

    Eagle3DraftModel.load_verifier_weights = lambda self: None  # the scene has the target's
    scene = load_file(folder / "scene.safetensors")
    answers = {}
    for head in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = SpeculatorModel.from_pretrained(str(head)).double().eval()
        for name in {"embed_tokens", "lm_head"} - stored_tables(head):
            getattr(model, name).weight.data = scene[name]
        outputs = []
        model.lm_head.register_forward_hook(lambda module, inputs, output, seen=outputs: seen.append(output[0]))
        with torch.no_grad():
            rows = DRIVERS[head.name](model, scene)
        save_file({"logits": outputs[0][rows].contiguous()}, folder / f"{head.name}.safetensors")
        answers[head.name] = {"rows": len(rows)}
    return answers


def stored_tables(head: Path) -> set[str]:
    """Name the tables that a head has of its own."""
    from safetensors.torch import load_file

    return {name.removesuffix(".weight") for name in load_file(head / "model.safetensors")}


def run_eagle3(model: torch.nn.Module, scene: dict[str, torch.Tensor]) -> list[int]:
    """Run one step over the prompt, whose row p has the token after p; the last row drafts."""
    following = torch.cat([scene["token_ids"][1:], scene["next_token"]])[None]
    model(scene["features"][None], following, torch.zeros_like(following), ttt_steps=1)
    return [following.shape[1] - 1]


def run_p_eagle(model: torch.nn.Module, scene: dict[str, torch.Tensor]) -> list[int]:
    """Run the prompt's rows, and mask rows after the last one in place of a random sample of them."""
    import speculators.models.peagle.core as module

    length = len(scene["token_ids"])
    masks = torch.arange(1, NUM_DRAFTS)
    starts = torch.cat([torch.arange(length), torch.full_like(masks, length - 1)])
    depths = torch.cat([torch.zeros(length, dtype=torch.int64), masks])
    module.generate_cod_sample_indices = lambda **_: (starts, depths)
    module.compute_metrics = lambda **_: (None, None)  # a loss for GPUs
    following = torch.cat([scene["token_ids"][1:], scene["next_token"], torch.zeros_like(masks)])[None]
    features = torch.nn.functional.pad(scene["features"], (0, 0, 0, len(masks)))[None]
    verifier = torch.zeros(1, length + len(masks), model.hidden_size, dtype=torch.float64)
    documents = torch.zeros_like(following)
    model(features, following, documents, loss_mask=documents + 1, verifier_last_hidden_states=verifier)
    return list(range(length - 1, length + len(masks)))


def run_block(model: torch.nn.Module, scene: dict[str, torch.Tensor]) -> list[int]:
    """Run the block of the one anchor, the token after the prompt."""
    length = len(scene["token_ids"])
    rest = model.block_size
    tokens = torch.nn.functional.pad(torch.cat([scene["token_ids"], scene["next_token"]]), (0, rest))[None]
    features = torch.nn.functional.pad(scene["features"], (0, 0, 0, 1 + rest))[None]
    is_anchor = (torch.arange(length + 1 + rest) == length)[None].long()
    verifier = torch.zeros(1, length + 1 + rest, model.config.transformer_layer_config.hidden_size).double()
    model._backbone_forward(features, tokens, is_anchor, verifier, torch.zeros_like(tokens), max_anchors=1)
    return list(range(0 if model.config.sample_from_anchor else 1, model.block_size))


NUM_DRAFTS = 3
DRIVERS = {"eagle3": run_eagle3, "p-eagle": run_p_eagle, "dflash": run_block, "dspark": run_block}


if __name__ == "__main__":
    action, where = sys.argv[1:]
    print(json.dumps({"read": read, "save": save, "run": run}[action](Path(where))))
