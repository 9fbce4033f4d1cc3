"""The differential: the fast implementation and the reference compute the same rounds."""

from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.grid_run import check, run_grid
from specsim.correctness.differential.grids import GRIDS, grid
from specsim.correctness.differential.result import CellResult, Divergence, GridResult

__all__ = ["GRIDS", "Cell", "CellResult", "Divergence", "GridResult", "check", "grid", "run_grid"]
