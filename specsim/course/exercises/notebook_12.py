"""Exercises of notebook 12: other drafters."""

from fractions import Fraction

from specsim.course.exercise import solves


# The longest n-gram that occurs earlier decides. No weights are read, so such drafts cost almost nothing.
# - `range(len(tokens) - n)` → `reversed(range(len(tokens) - n))`: That is the latest match. Prompt lookup as in vLLM
#   takes the earliest: the text after it is the longest.
# - `range(max_ngram, 0, -1)` → `range(1, max_ngram + 1)`: Short n-grams were tried first. A long match says much more
#   about what follows, so begin with max_ngram.
# - `(tokens) - n` → `(tokens) - n + 1`: Nothing is proposed, although a shorter n-gram has a match. Either the last n
#   tokens were found as a match of themselves, where no token follows, or only n = max_ngram is tried.
# - `range(max_ngram, 0, -1)` → `range(max_ngram, 1, -1)`: n = 1 is never tried: range(max_ngram, 1, -1) ends at 2.
# - `range(len(tokens) - n)` → `range(len(tokens) - 2 * n + 1)`: A match must begin earlier, but it may overlap the last
#   n tokens: in 7 7 7, the first two tokens equal the last two, and a 7 follows.
# - `tokens[start + n : start + n + num_drafts]` → `tokens[start : start + num_drafts]`: The match itself is proposed.
#   Its tokens are already at the end of the text: begin after them.
# - `start + n : start + n + num_drafts` → `start + n :`: All tokens after the match are proposed. A round verifies at
#   most num_drafts of them.
@solves("12-1", ([1, 2, 3, 9, 1, 2, 3], 3, 2), ([5, 1, 6, 1, 7, 1], 2, 2), ([2, 4, 1, 2, 8, 1, 2], 2, 2),
        ([7, 7, 7], 2, 3), ([1, 2, 3], 3, 4), ([9, 1, 2, 3, 1, 2], 3, 2), ([4], 2, 2))  # fmt: skip
def prompt_lookup(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    """Propose at most num_drafts tokens: those after the earliest match of the longest n-gram that occurs earlier."""
    for n in range(max_ngram, 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + num_drafts]
    return []


# Mask, divide by the sum, number by the target's ids. Verification gets exactly this q, so it stays lossless.
# - `[by_text.get(text, Fraction(0)) for text in target_tokens]` →
#   `[*draft_prob, *[Fraction(0)] * len(target_tokens)][: len(target_tokens)]`: Equal ids do not mean equal tokens, and
#   equal sizes do not prove it. Engines had exactly this fault: tokens have to be matched by their texts.
# - `weight / sum(weights)` → `weight`: The probabilities do not sum to 1 where the drafter has tokens that the target
#   lacks. Drafts are drawn from the common tokens only, and verification needs the distribution from which they were
#   drawn.
# - `weight / sum(weights)` → `weight + (1 - sum(weights)) / len(weights)`: The rest of the probability was given to all
#   tokens, also to those that the drafter does not know. Divide by the sum instead.
# - `weight / sum(weights)` → `weight and weight + (1 - sum(weights)) / sum(map(bool, weights))`: The rest of the
#   probability was shared out equally. Then the relation between two common tokens changes: divide by the sum instead.
# - `for weight in weights` → `for weight in weights if weight`: The list has only the common tokens. It needs one entry
#   for every token of the target, and 0 for those that the drafter does not know.
# - `[*draft_prob, *[Fraction(0)] * len(target_tokens)][: len(target_tokens)]`: The probabilities were taken over by
#   their place in the list. Match the tokens by their texts, then divide by the sum.
@solves("12-2", ([Fraction(1, 2), Fraction(3, 8), Fraction(1, 8)], ["owl", "cat", "dog"], ["dog", "owl", "cat"]),
        ([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)], ["owl", "cat", "dog"], ["cat", "emu", "owl"]),
        ([Fraction(3, 4), Fraction(1, 4)], ["owl", "cat"], ["fox", "cat", "emu", "owl"]),
        ([Fraction(1, 8), Fraction(3, 4), Fraction(1, 8)], ["owl", "cat", "dog"], ["owl", "dog"]))  # fmt: skip
def bridged(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    """Compute the probability of every token of the target, by its id there, for a drafter with another vocabulary."""
    by_text = dict(zip(draft_tokens, draft_prob, strict=True))
    weights = [by_text.get(text, Fraction(0)) for text in target_tokens]
    return [weight / sum(weights) for weight in weights]


# Speed-up = accept length / (1 + drafts · cost). It is the formula of notebook 02, with a measured accept length.
# - `max(drafters, key=lambda name: drafters[name][0])`: The largest accept length is not the largest speed-up. A
#   drafter that is right more often may take more time than it saves.
# - `num_drafts * cost` → `cost`: The cost is that of one draft. Drafts are made one after the other, so a round pays it
#   num_drafts times.
# - `{"none": 1.0}` → `{}`: Where every speed-up is below 1, plain decoding is the best choice.
# - `accept_length / (1 + num_drafts * cost)` → `accept_length - num_drafts * cost`: Tokens and time were subtracted
#   from each other. A speed-up is tokens per time: divide the accept length by the time of a round.
# - `num_drafts * cost` → `(accept_length - 1) * cost`: Only the accepted drafts were paid for. Every draft of a round
#   is made, and a rejected one costs as much.
# - `accept_length / (` → `(accept_length + 1) / (`: The accept length counts the target's own token already. Add
#   nothing to it.
# - `num_drafts * cost` → `(num_drafts + 1) * cost`: One draft too many was paid for. A round makes num_drafts drafts.
@solves("12-3", ({"large": (3.5, 0.3), "small": (2.2, 0.02)}, 5),
        ({"eagle": (2.6, 0.05), "standalone": (3.2, 0.5), "ngram": (2.0, 0.0)}, 3), ({"slow": (1.3, 0.2)}, 3),
        ({"slow": (1.9, 0.4), "slower": (2.5, 0.6)}, 3), ({"ngram": (1.2, 0.0), "eagle": (2.9, 0.5)}, 4),
        ({"eagle": (1.75, 0.2)}, 3), ({"large": (4.0, 0.3), "small": (2.5, 0.03)}, 3))  # fmt: skip
def best_drafter(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    """Name the drafter with the largest speed-up; `none` where no drafter is faster than plain decoding.

    drafters: accept length and cost of one draft, as a share of a forward pass of the target, by name.
    """
    speedups = {"none": 1.0}
    for name, (accept_length, cost) in drafters.items():
        speedups[name] = accept_length / (1 + num_drafts * cost)
    return max(speedups, key=lambda name: speedups[name])
