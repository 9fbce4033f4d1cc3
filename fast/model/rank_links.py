"""Choice of the way that ranks exchange small parts on GPUs: through a library, or through each other's memory.

Both are measured once in a process, and sums have the same bits either way.
"""

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

import torch

from specsim.core.rank_group import RankGroup
from specsim.fast.model.rank_sums import sum_onto
from specsim.fast.runtime.graph import capture
from specsim.fast.runtime.peer_memory import LinkedRanks, PeerMemory, meet

MOST_BYTES = 4 * 2**20  # of a part
WIDTH = 4096  # of a measured row
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # 8 KiB to 4 MiB in bf16
_MOST_SPINS = 2**22  # some seconds
_SUMS = 20  # in one graph
_REPLAYS = 9


class LinkTime(NamedTuple):
    """Microseconds of a sum over ranks, the slowest rank's."""

    num_bytes: int  # of each part
    library: float
    peers: float
    is_equal: bool  # bit for bit


class Links(NamedTuple):
    """Ranks that see each other's memory, or the reason why they do not."""

    peers: PeerMemory | str
    times: tuple[LinkTime, ...] = ()

    @property
    def most_bytes(self) -> int:
        """Size up to which the memory of the others is the faster way, without an error."""
        most = 0
        for each in self.times:
            if not each.is_equal:
                return 0
            if each.peers > each.library:
                break
            most = each.num_bytes
        return most


def linked(ranks: RankGroup | None, device: torch.device) -> RankGroup | None:
    """Let ranks exchange parts through each other's memory, up to the size where a library is faster."""
    if ranks is None or device.type != "cuda":
        return ranks
    found = links(ranks.size)
    if isinstance(found.peers, str) or not found.most_bytes:
        return ranks
    return LinkedRanks(ranks.rank, ranks.size, ranks.board, found.peers, found.most_bytes)


@cache
def links(size: int) -> Links:
    """Connect this process with the other ranks of its machine, and measure sums of both kinds."""
    ranks = RankGroup.joined(size)
    if ranks is None:
        return Links("there is one rank")
    device = torch.device("cuda")
    peers = meet(ranks, device, MOST_BYTES)
    if isinstance(peers, str):
        return Links(peers)
    # A rank that waits in vain has another sum, and none uses that memory.
    linked_ranks = LinkedRanks(ranks.rank, ranks.size, ranks.board, peers, MOST_BYTES).within(_MOST_SPINS)
    with torch.inference_mode():
        own = [_measured((ranks, linked_ranks), rows, device) for rows in ROWS]
    return Links(peers, slowest(ranks.gather_objects(own)))


def slowest(by_rank: Sequence[Sequence[LinkTime]]) -> tuple[LinkTime, ...]:
    """Combine the times of all ranks, so that every rank makes the same choice."""
    return tuple(
        LinkTime(
            each[0].num_bytes,
            max(time.library for time in each),
            max(time.peers for time in each),
            all(time.is_equal for time in each),
        )
        for each in zip(*by_rank, strict=True)
    )


def _measured(ways: tuple[RankGroup, RankGroup], num_rows: int, device: torch.device) -> LinkTime:
    generator = torch.Generator(device).manual_seed(ways[0].rank)
    part = torch.randn(num_rows, WIDTH, generator=generator, device=device).to(torch.bfloat16)
    sums = [sum_onto(ranks, None, part).values for ranks in ways]
    library, peers = (_time(ranks, part) for ranks in ways)
    return LinkTime(part.nbytes, library, peers, torch.equal(*sums))


def _time(ranks: RankGroup, part: torch.Tensor) -> float:
    """Measure the microseconds of a sum in a graph of many."""

    def work() -> None:
        for _ in range(_SUMS):
            sum_onto(ranks, None, part)

    graph = capture(work, part.device)
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / _SUMS)
    return median(times)
