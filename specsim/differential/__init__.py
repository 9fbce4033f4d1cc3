"""The differential: proof that a fast column and the slow reference column compute the same rounds."""

from specsim.differential.cell import Cell
from specsim.differential.divergence import Divergence
from specsim.differential.grids import GRIDS, grid
from specsim.differential.result import CellResult, GridResult
from specsim.differential.run import check, run_grid

__all__ = ["GRIDS", "Cell", "CellResult", "Divergence", "GridResult", "check", "grid", "run_grid"]
