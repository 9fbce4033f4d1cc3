"""The differential: proof that a fast column and the slow reference column compute the same rounds."""

from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.divergence import Divergence
from specsim.correctness.differential.grid_run import check, run_grid
from specsim.correctness.differential.grids import GRIDS, grid
from specsim.correctness.differential.result import CellResult, GridResult

__all__ = ["GRIDS", "Cell", "CellResult", "Divergence", "GridResult", "check", "grid", "run_grid"]
