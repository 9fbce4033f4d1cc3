"""The most drafts that any lossless rule could accept on a case, by linear programming."""

from specsim.certify.model import Case, draws, text_prob, texts


def optimum(case: Case) -> float:
    """The largest expected number of accepted drafts.

    Over all rules that know the drafted tree and both models, keep a path of the tree, add one token and leave all
    later ones to the target, so that S + 1 tokens have exactly the target's law. With one step this is the maximal
    coupling, Σ min(p, q), and with siblings SpecTr's transport (arXiv 2310.15141). Variables: the probability that a
    tree is drafted, its path ends at a node and a token follows. Solved by HiGHS in float64.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    drafted, length = list(draws(case)), case.num_steps + 1
    all_texts = {text: row for row, text in enumerate(texts(case.target.vocab_size, length), len(drafted))}
    gains, entries = [], []
    for index, draw in enumerate(drafted):
        for node in range(len(draw.parents)):
            for token in range(case.target.vocab_size):
                tokens = (*draw.text(node), token)
                column, given = len(gains), len(tokens)
                gains.append(-(given - 1))
                entries.append((index, column, 1.0))
                for rest in texts(case.target.vocab_size, length - given):
                    chance = text_prob(case.target, (*tokens, *rest), given)
                    entries.append((all_texts[(*tokens, *rest)], column, float(chance)))
    bounds = [draw.prob for draw in drafted] + [text_prob(case.target, text) for text in all_texts]
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(bounds), len(gains)))
    solved = linprog(gains, A_eq=matrix.tocsr(), b_eq=list(map(float, bounds)), method="highs")
    if not solved.success:
        raise ArithmeticError(f"{case.name}: {solved.message}")
    return -solved.fun
