"""Choice of the way that ranks exchange small parts on GPUs: through a library, or through each other's memory.

Both are measured once in a process, and sums have the same bits either way.
"""

from functools import cache
from itertools import takewhile
from math import nan
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
    """Microseconds of a sum over ranks, on the slowest one."""

    num_bytes: int  # of each part
    library: float
    peers: float
    is_equal: bool  # bit for bit


class Links(NamedTuple):
    """Ranks that see each other's memory, or the reason why they do not."""

    peers: PeerMemory | str
    times: tuple[LinkTime, ...] = ()

    @property
    def reason(self) -> str:
        """Obstacle to the use of that memory; empty where there is none."""
        if isinstance(self.peers, str):
            return self.peers
        return "" if all(each.is_equal for each in self.times) else "sums through the memory of other GPUs differ"

    @property
    def most_bytes(self) -> int:
        """Size up to which the memory of the others is the faster way, 0 for none."""
        if self.reason:
            return 0
        faster = takewhile(lambda each: each.peers <= each.library, self.times)
        return max((each.num_bytes for each in faster), default=0)


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
    through = LinkedRanks(ranks.rank, ranks.size, ranks.board, peers, MOST_BYTES)
    with torch.inference_mode():
        # Compile without waiting for the others, which may take seconds longer.
        sum_onto(through.within(0), None, torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device))
        torch.cuda.synchronize()
        # A rank that waits in vain has another sum then, and none uses that memory.
        return Links(peers, measured(ranks, through.within(_MOST_SPINS), device))


def measured(library: RankGroup, peers: RankGroup, device: torch.device) -> tuple[LinkTime, ...]:
    """Measure sums of both ways by size, up to the first one that differs; every rank gets the same times."""
    times = []
    for num_rows in ROWS:
        generator = torch.Generator(device).manual_seed(library.rank)
        part = torch.randn(num_rows, WIDTH, generator=generator, device=device).to(torch.bfloat16)
        library.gather_objects(None)
        sums = [sum_onto(ranks, None, part).values for ranks in (library, peers)]
        if not all(library.gather_objects(torch.equal(*sums))):
            times.append(LinkTime(part.nbytes, nan, nan, False))
            break
        own = [_time(ranks, part) for ranks in (library, peers)]
        by_library, by_peers = (max(each) for each in zip(*library.gather_objects(own), strict=True))
        times.append(LinkTime(part.nbytes, by_library, by_peers, True))
    return tuple(times)


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
