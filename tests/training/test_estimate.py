"""The estimate of acceptance counts rounds of chains, and equals what the reference engine accepts."""

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.models.load import load
from specsim.models.shipped import TINY, load_prompts
from specsim.serving.generation import generate
from specsim.training import continue_texts, estimate_acceptance, load_target, read_eagle3
from specsim.training.estimate import NEW_TOKENS, Continuation, chain_rounds


def test_chain_rounds_jump_over_what_they_accept():
    agrees = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    rounds = chain_rounds(agrees, first_root=2, num_drafts=3)
    assert rounds == [2, 0, 3]


def test_continuations_keep_their_prompts():
    target = load_target(TINY / "target")
    ids = [[5, 6, 7], [8, 9]]
    continuations = continue_texts(target, ids)
    assert [text.tokens_C[: text.prompt_len].tolist() for text in continuations] == ids
    assert [len(text.new_tokens) for text in continuations] == [NEW_TOKENS, NEW_TOKENS]


def test_estimate_equals_what_the_engine_accepts():
    """The served rounds are the first ones of the estimate, since both decode the same text."""
    pair = load()
    assert pair.tokenizer is not None
    texts = [prompt["text"] for prompt in load_prompts()[:2]]
    chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    served = generate(pair, texts, chain, SamplingParams(max_new_tokens=40))
    target = load_target(TINY / "target")
    head = read_eagle3(TINY / "eagle3", target)
    for text, output in zip(texts, served.outputs, strict=True):
        ids = pair.tokenizer.encode(text)
        tokens = torch.tensor([*ids, *output.token_ids])
        estimate = estimate_acceptance(head, target, [Continuation(tokens, len(ids))])
        rounds = output.num_accepted_tokens_per_round[: estimate.rounds]
        assert estimate.rounds >= 6
        assert estimate.accept_length == sum(rounds) / len(rounds)
