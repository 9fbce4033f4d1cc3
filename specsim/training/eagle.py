"""EAGLE and EAGLE-3 heads in training: a head reads its own output, as at inference.

B windows · C columns (tokens) of a window · R rows = C - unrolled steps · V vocabulary · H hidden.
The row that consumes token r + 1 and the hidden of position r is row r, at rope position r.
Sources: EAGLE (arXiv 2401.15077) and its regression term, EAGLE-3 (arXiv 2503.01840) and its training-time test.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specsim.core.arguments import check_arguments
from specsim.training.attention import DrafterAttention, Memory, Rope, rope_at
from specsim.training.drafter import DrafterModule, Drafts, Roots, llama_fields
from specsim.training.options import ENGINE, Conventions, TrainingOptions
from specsim.training.target import TargetReading, read_target

REGRESSION = 0.2  # weight of EAGLE-1's distance between its output and the target's


class EagleModule(DrafterModule):
    """An EAGLE head, called with tokens [B, R], hiddens [B, R, H], the first row's position, and the memory."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, conventions: Conventions) -> None:
        super().__init__()
        self.config = config
        self.conventions = conventions
        self.feature_layers = list(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ())
        self.rotary = LlamaRotaryEmbedding(config)

    @abstractmethod
    def first_hidden(self, reading: TargetReading) -> torch.Tensor:
        """Hidden [B, C, H] that the first step reads."""

    @property
    @abstractmethod
    def readout(self) -> tuple[nn.Module, nn.Module]:
        """Norm and lm_head that turn a hidden into logits of the draft ids."""

    def read(self, target: LlamaForCausalLM, tokens_BC: torch.Tensor) -> TargetReading:
        return read_target(target, tokens_BC, self.feature_layers, self.conventions.feature_states)

    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        """Unroll the head over all rows; those whose target's first choice is outside the vocabulary do not count."""
        num_rows = tokens_BC.shape[1] - num_drafts
        row_R = torch.arange(num_rows, device=tokens_BC.device)
        is_drafted_BC = self._is_drafted(reading.logits_BCV.argmax(-1))
        memory: Memory = []
        hidden_BRH = self.first_hidden(reading)[:, :num_rows]
        drafts = []
        for step in range(num_drafts):
            output_BRH = self(tokens_BC[:, step + 1 : step + 1 + num_rows], hidden_BRH, step, memory)
            logits_BRV, hidden_BRH = self.conventions.read_out(output_BRH, *self.readout)
            column_R = self.conventions.label_column(row_R, step)
            counts_BR = is_drafted_BC[:, column_R].float()
            columns_BR = column_R.expand(len(tokens_BC), -1)
            drafts.append(Drafts(logits_BRV, columns_BR, counts_BR / counts_BR.mean(), output_BRH))
        return drafts

    def _is_drafted(self, token_BC: torch.Tensor) -> torch.Tensor:
        if self.vocabulary is None:
            return torch.ones_like(token_BC, dtype=torch.bool)
        return torch.isin(token_BC, self.vocabulary)


class EagleLayer(nn.Module):
    """A Llama layer without its first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x_BRH: torch.Tensor, rope: Rope, memory: Memory) -> torch.Tensor:
        x_BRH = x_BRH + self.self_attn.attend_path(self.self_attn.heads(x_BRH, rope), memory)
        return x_BRH + self.mlp(self.post_attention_layernorm(x_BRH))


class Eagle(EagleModule):
    """EAGLE-1/2: predicts the tensor that the target's lm_head reads, and borrows that lm_head."""

    def __init__(self, config: LlamaConfig, target_head: nn.Linear, conventions: Conventions = ENGINE) -> None:
        super().__init__(config, conventions)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.borrowed = {"lm_head": target_head}
        self.embed_tokens.weight.data.copy_(target_head.weight)

    def first_hidden(self, reading: TargetReading) -> torch.Tensor:
        return reading.hidden_BCH

    def forward(
        self, token_BR: torch.Tensor, hidden_BRH: torch.Tensor, first_position: int, memory: Memory
    ) -> torch.Tensor:
        x_BRH = self.fc(torch.cat([self.embed_tokens(token_BR), hidden_BRH], -1))
        return self.layers[0](x_BRH, rope_at(self.rotary, x_BRH, first_position), memory)

    @property
    def readout(self) -> tuple[nn.Module, nn.Module]:
        return nn.Identity(), self.borrowed["lm_head"]

    def auxiliary_loss(self, drafts: Drafts, prob_BAV: torch.Tensor, reading: TargetReading) -> torch.Tensor:
        """Smooth L1 between its output and the tensor that it predicts."""
        assert drafts.hidden_BAH is not None
        return REGRESSION * F.smooth_l1_loss(drafts.hidden_BAH.float(), drafts.at_columns(reading.hidden_BCH).float())


class Eagle3Layer(nn.Module):
    """A Llama layer with attention over the token's embedding and the hidden, each under its own norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = DrafterAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedding_BRH: torch.Tensor, hidden_BRH: torch.Tensor, rope: Rope, memory: Memory
    ) -> torch.Tensor:
        x_BRI = torch.cat([self.input_layernorm(embedding_BRH), self.hidden_norm(hidden_BRH)], -1)
        hidden_BRH = hidden_BRH + self.self_attn.attend_path(self.self_attn.heads(x_BRI, rope), memory)
        return hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))


class Eagle3(EagleModule):
    """EAGLE-3: reads features of several of the target's layers and has a smaller vocabulary of its own."""

    d2t: torch.Tensor  # i64 [draft vocabulary], offset from a draft id to its target id
    t2d: torch.Tensor  # bool [V], whether a target id has a draft id

    def __init__(
        self,
        config: LlamaConfig,
        target_embedding: nn.Embedding,
        draft_ids: torch.Tensor,
        conventions: Conventions = ENGINE,
    ) -> None:
        super().__init__(config, conventions)
        self.fc = nn.Linear(len(self.feature_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        self.borrowed = {"embed_tokens": target_embedding}
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        is_drafted_V = torch.zeros(config.vocab_size, dtype=torch.bool, device=draft_ids.device)
        self.register_buffer("t2d", is_drafted_V.index_fill(0, draft_ids, True))
        self.lm_head.weight.data.copy_(target_embedding.weight[draft_ids])

    @property
    def vocabulary(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def first_hidden(self, reading: TargetReading) -> torch.Tensor:
        return self.fc(reading.features_BCF)

    def forward(
        self, token_BR: torch.Tensor, hidden_BRH: torch.Tensor, first_position: int, memory: Memory
    ) -> torch.Tensor:
        embedding_BRH = self.borrowed["embed_tokens"](token_BR)
        return self.midlayer(embedding_BRH, hidden_BRH, rope_at(self.rotary, hidden_BRH, first_position), memory)

    @property
    def readout(self) -> tuple[nn.Module, nn.Module]:
        return self.norm, self.lm_head

    @torch.no_grad()
    def copy_last_layer(self, target: LlamaForCausalLM) -> None:
        """Start from the target's last layer and norm, which learns faster than random values.

        The head reads the last of its features, and not yet the token. An MLP of another size stays random.
        """
        layer: Any = target.model.layers[-1]
        width = self.config.hidden_size
        self.fc.weight.zero_()[:, -width:] = torch.eye(width, device=self.fc.weight.device)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(self.midlayer.self_attn, name).weight[:, width:] = getattr(layer.self_attn, name).weight
        self.midlayer.self_attn.o_proj.load_state_dict(layer.self_attn.o_proj.state_dict())
        self.midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
        self.midlayer.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        if self.config.intermediate_size == target.config.intermediate_size:
            self.midlayer.mlp.load_state_dict(layer.mlp.state_dict())


def build_eagle(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> Eagle:
    """Build an untrained head of EAGLE-1/2 with its target's sizes."""
    fields = llama_fields(
        target,
        architectures=["LlamaForCausalLMEagle"],
        bias=True,
        num_hidden_layers=1,
        intermediate_size=options.intermediate_size or target.config.intermediate_size,
    )
    return Eagle(LlamaConfig(**fields), target.lm_head, options.conventions)


def build_eagle3(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> Eagle3:
    """Build an untrained EAGLE-3 head, whose vocabulary is the text's most frequent ids, in ascending order."""
    size = min(options.draft_vocab_size, target.config.vocab_size)
    fields = llama_fields(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=size,
        eagle_aux_hidden_state_layer_ids=list(options.feature_layers_of(target.config.num_hidden_layers)),
        eagle_aux_hidden_state_convention="entering",
        norm_before_residual=False,
        num_hidden_layers=1,
        intermediate_size=options.intermediate_size or target.config.intermediate_size,
    )
    frequency_V = torch.bincount(tokens, minlength=target.config.vocab_size)
    draft_ids = frequency_V.argsort(descending=True, stable=True)[:size].sort().values
    head = Eagle3(LlamaConfig(**fields), target.model.embed_tokens, draft_ids, options.conventions)
    if options.from_target:
        head.copy_last_layer(target)
    return head


@check_arguments
def read_eagle3(folder: Path, target: LlamaForCausalLM, conventions: Conventions = ENGINE) -> Eagle3:
    """Read an EAGLE-3 head that was written, in float32."""
    tensors = load_file(folder / "model.safetensors")
    draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = Eagle3(LlamaConfig.from_pretrained(folder), target.model.embed_tokens, draft_ids, conventions)
    floats = {name: value.float() for name, value in tensors.items() if value.is_floating_point()}
    head.load_state_dict(tensors | floats)
    nn.Module.requires_grad_(head, False)
    return head
