"""Map of the package: folders as boxes, imports as arrows, and the resulting levels.

python tests/tools/import_map.py [DEPTH]: folders at this depth below specsim, 1 unless given.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import grimp

Arrows = Mapping[str, frozenset[str]]  # by box, the boxes that it imports


@dataclass(frozen=True, slots=True)
class ImportMap:
    """Boxes with their arrows and levels; a box lies one level above the highest that it imports."""

    arrows: Arrows
    levels: Mapping[str, int]  # from 1; empty where there is a circle
    circle: tuple[str, ...]  # boxes that import each other in a circle, the first again at the end; () for none

    @property
    def num_arrows(self) -> int:
        """Number of ordered pairs of boxes in which the first imports the second."""
        return sum(map(len, self.arrows.values()))

    def __str__(self) -> str:
        order = sorted(self.arrows, key=lambda box: (-self.levels.get(box, 0), box))
        rows = [f"{self.levels.get(box, '-'):>5}  {box}: {', '.join(sorted(self.arrows[box])) or '-'}" for box in order]
        height = max(self.levels.values(), default=0)
        circles = " → ".join(self.circle) or "none"
        total = f"{len(self.arrows)} boxes, {self.num_arrows} arrows, {height} levels, circles: {circles}"
        return "\n".join(["level  folder: its imports", *rows, "", total])


def import_map(depth: int = 1, package: str = "specsim") -> ImportMap:
    """Build the map of a package from all its imports, those inside functions included.

    depth: a module belongs to the box of its first `depth` names below the package; a file counts as a box of its own
    where it lies above that depth.
    """
    graph = grimp.build_graph(package)
    arrows: dict[str, set[str]] = {}
    for module in sorted(graph.modules - {package, f"{package}.__main__"}):
        boxes_of_module = arrows.setdefault(_box(module, depth), set())
        boxes_of_module |= {
            _box(imported, depth) for imported in graph.find_modules_directly_imported_by(module) if imported != package
        }
    return layered({box: frozenset(boxes - {box}) for box, boxes in arrows.items()})


def _box(module: str, depth: int) -> str:
    return ".".join(module.split(".")[1 : depth + 1])


def layered(arrows: Arrows) -> ImportMap:
    """Compute every box's level, or find one circle."""
    try:
        order = tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return ImportMap(arrows, {}, tuple(reversed(error.args[1])))
    levels: dict[str, int] = {}
    for box in order:
        levels[box] = 1 + max((levels[imported] for imported in arrows.get(box, ())), default=0)
    return ImportMap(arrows, levels, ())


def main(arguments: Sequence[str]) -> None:
    """Print the map."""
    print(import_map(int(arguments[0]) if arguments else 1))


if __name__ == "__main__":
    main(sys.argv[1:])
