"""Dump a drafter's tensors from a real vLLM: python vllm_dump.py JOB.json TENSORS.safetensors.

Runs in the engine's own environment. JOB.json has token_ids of one prompt and the arguments of vllm.LLM. The file has
the tensors of the prefill and of the first drafts, under the names that `specsim parity` reads.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm_run import ENVIRONMENT, SETTINGS

SKIPPED = ("", "model", "lm_head", "logits_processor", "model.embed_tokens")


class Dump:
    """Tensors by name, while it is on."""

    def __init__(self, phases: list[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._phases = phases  # of the drafter's forwards
        self._forwards = 0
        self.is_on = False

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, the first of its name."""
        if self.is_on and self._forwards <= len(self._phases):
            self.tensors.setdefault(name, tensor.detach().clone().contiguous())

    def put_drafter(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of the current forward of the drafter."""
        if 0 < self._forwards <= len(self._phases):
            self.put(f"{self._phases[self._forwards - 1]}/{name}", tensor)

    def begin(self, *_: object) -> None:
        """Count a forward of the drafter."""
        self._forwards += self.is_on

    def wrap(self, owner: object, name: str, see) -> None:
        """Let `see(arguments, result)` see every call of a method."""
        method = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = method(*args, **kwargs)
            see(args, result)
            return result

        setattr(owner, name, wrapped)

    def hook_drafter(self, drafter: torch.nn.Module, layer_0: str) -> None:
        """Take the output of every module."""
        drafter.register_forward_pre_hook(self.begin)
        for path, module in drafter.named_modules():
            if path not in SKIPPED:
                name = path.removeprefix("model.").replace("layers.0", layer_0)
                module.register_forward_hook(lambda _, __, output, name=name: self._put_module(name, output))
        self.wrap(drafter, "compute_logits", lambda _, result: self.put_drafter("lm_head", result))

        def features(args, result) -> None:
            self.put("target/features", args[0])
            self.put("extend/fc", result)

        self.wrap(drafter, "combine_hidden_states", features)

    def _put_module(self, name: str, output) -> None:
        if name.endswith("rotary_emb"):
            for part, tensor in zip("qk", output, strict=False):
                self.put_drafter(name.replace("rotary_emb", f"{part}_rotated"), tensor)
        elif name.endswith("post_attention_layernorm"):
            self.put_drafter(name.replace("post_attention_layernorm", "after_attention"), output[1])
        elif name.endswith(("proj", "attn.attn", "norm", "layernorm")):
            self.put_drafter(name, output[0] if isinstance(output, tuple) else output)

    def hook_context(self, model: torch.nn.Module) -> None:
        """Take a block drafter's keys and values of the context."""

        def layers(name: str, tensors) -> None:
            for layer, tensor in enumerate(tensors):
                self.put(f"extend/layers.{layer}.self_attn.{name}", tensor)

        def projections(_, result) -> None:
            layers("k_proj", result[0])
            layers("v_proj", result[1])

        self.wrap(model, "_project_context_kv", projections)
        self.wrap(model, "_normalize_context_k", lambda _, result: layers("k_norm", result))
        for index, layer in enumerate(model.layers):
            name = f"extend/layers.{index}.self_attn.k_rotated"
            self.wrap(
                layer.self_attn.attn.impl, "do_kv_cache_update", lambda args, _, name=name: self.put(name, args[1])
            )


def main(job_file: str, tensors_file: str) -> None:
    """Run one prompt, and keep what the first drafts are made of."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    engine = LLM(**SETTINGS, **job["engine"])
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter.model
    is_block = hasattr(drafter, "precompute_and_store_context_kv")
    dump = Dump(["draft1"] if is_block else ["extend", "draft1", "draft2"])
    dump.hook_drafter(drafter, "layers.0" if is_block else "midlayer")
    if is_block:
        dump.hook_context(drafter.model)
    dump.is_on = True
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": job["token_ids"]}], params, use_tqdm=False)
    dump.tensors["token_ids"] = torch.tensor(job["token_ids"])
    dump.tensors["next_token"] = torch.tensor(output.outputs[0].token_ids[:1])
    save_file(dump.tensors, tensors_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
