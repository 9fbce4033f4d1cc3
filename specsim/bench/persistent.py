"""The persistent forward and the kernels side by side: rounds and verify forwards over the context length."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from specsim.bench.checks import all_of, equal
from specsim.bench.clock import launched, replayed
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.roofline import Peaks, forward_bound, round_bound
from specsim.bench.round_checks import check_round, tensors_of
from specsim.bench.row import OURS, Check, Row
from specsim.bench.scale import EAGLE3, INVENTED, PLAIN
from specsim.bench.scene import Scene, close, invented, stacked, tree_of
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.phases import VerifyInput
from specsim.models.shapes import random_pair, shape
from specsim.serving.generation import load_engine

KERNELS = "kernels"
LENGTHS = (1024, 8192, 32768)
ROUNDS = 4
SAMPLES = 9
# Name, setting, and largest time over roofline bound; forwards are those of the second setting's trees.
SETTINGS = (("plain decode", PLAIN, 1.17), ("EAGLE-3 round", EAGLE3, 1.28))
FORWARD_LIMIT = 1.25


def persistent_rows(name: str, peaks: Peaks, quick: bool) -> Iterator[Row]:
    """Time one request with both forwards in one run, after checks of each; quick: only the shortest context."""
    lengths = LENGTHS[: 1 if quick else None]
    of = shape(name)
    longest = max(of.config.max_position_embeddings, lengths[-1] + 256)
    of = replace(of, config=replace(of.config, max_position_embeddings=longest))
    pair = stacked(random_pair(of, "cuda", torch.bfloat16))
    for label, config, limit in SETTINGS:
        used = replace(pair, drafter=None) if config.is_plain else pair
        yield from _rows_of(label, used, config, lengths, limit, peaks)
        gc.collect()
        torch.cuda.empty_cache()


def _rows_of(
    label: str, pair: Pair, config: SpecConfig, lengths: tuple[int, ...], limit: float, peaks: Peaks
) -> Iterator[Row]:
    """Time rounds, and forwards of trees, over pools of random KV that both engines use."""
    plain = EngineOptions("fast", torch.bfloat16, "cuda", "round", 1, forward="kernels")
    engines = {
        OURS: load_engine(pair, config, replace(plain, forward="persistent")),
        KERNELS: load_engine(pair, config, plain),
    }
    pools = engines[OURS].make_pools(1, config.reserved_columns(lengths[-1] + 64))
    for kv in (pools.target, pools.draft):
        for part in () if kv is None else (*kv.keys, *kv.values):
            part.normal_()
    for length in lengths:
        scene = invented(pair, engines[KERNELS], pools, 1, length)
        scenes = {who: replace(scene, engine=engine) for who, engine in engines.items()}
        try:
            row = _round_row(label, scenes, length, limit, peaks)
            yield row
            if not config.is_plain:
                yield _forward_row(scenes, row.checks, length, peaks)
        finally:
            close(scene)


def checked(scene: Scene) -> Check:
    """Check a round by an independent forward and the reference, and against itself bit for bit."""
    again = equal("twice the same round, bit for bit", tensors_of(scene.round()), tensors_of(scene.round()))
    round_ = check_round(scene, with_eager=False)
    return all_of(f"{round_.compared}; {again.compared}", round_, again)


def _round_row(label: str, scenes: dict[str, Scene], length: int, limit: float, peaks: Peaks) -> Row:
    scene = scenes[OURS]
    target = scene.pair.target.config
    bound = round_bound(target, scene.pair.checkpoint and scene.pair.checkpoint.config, scene.engine.config, 1, length)
    contenders = [
        Contender(
            who,
            lambda _: None,
            lambda _, scene=scene: checked(scene),
            lambda scene=scene: replayed(lambda: scene.again(ROUNDS), SAMPLES, ROUNDS),
        )
        for who, scene in scenes.items()
    ]
    setting = {"requests": 1, "L": length, "tree": tree_of(scene.engine.config)}
    return contest(label, setting, contenders, bound, peaks, set_targets=roofline_target(limit), notes=[INVENTED])


def _forward_row(scenes: dict[str, Scene], checks: Mapping[str, Check], length: int, peaks: Peaks) -> Row:
    """Time the target's forward over a tree, logits included; each has to give its checked round's logits."""
    verify_input = scenes[KERNELS].round().verify_input
    target = scenes[KERNELS].pair.target.config
    nodes = scenes[KERNELS].engine.config.num_draft_tokens
    contenders = [_forward_contender(who, scenes[who], verify_input, check) for who, check in checks.items()]
    setting = {"requests": 1, "L": length, "nodes": nodes}
    bound = forward_bound(target, 1, nodes, length)
    set_targets = roofline_target(FORWARD_LIMIT)
    return contest("verify forward", setting, contenders, bound, peaks, set_targets=set_targets, notes=[INVENTED])


def _forward_contender(who: str, scene: Scene, verify_input: VerifyInput, round_: Check) -> Contender:
    from specsim.fast.model.draft_metadata import tree_metadata

    engine = scene.engine

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        metadata = tree_metadata(scene.batch, verify_input, scene.pools)
        ids = verify_input.draft_tokens.view(-1)
        output = engine.target.forward(ids, metadata, scene.pools.target, engine.drafter.feature_layers)
        return engine.target.logits(output.hidden)

    def check(found: torch.Tensor) -> Check:
        expected = {"logits": scene.round().verify_output.target_logits}
        return all_of(round_.compared, round_, equal("the round's logits, bit for bit", {"logits": found}, expected))

    return Contender(who, lambda _: forward(), check, lambda: launched(lambda _: forward(), 1, 30, 1))
