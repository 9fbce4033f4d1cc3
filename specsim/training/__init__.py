"""Training of drafters for a target of the Llama family, on text that the target continues itself."""

from specsim.training.drafter import DrafterModule, Drafts, Roots
from specsim.training.eagle import read_eagle3
from specsim.training.estimate import Continuation, continue_texts, estimate_acceptance
from specsim.training.losses import LOSSES, POSITION_WEIGHTS
from specsim.training.options import ENGINE, Conventions, TrainingOptions, label_column, read_out
from specsim.training.target import TargetReading, feature_states, load_target, read_target
from specsim.training.train import Trained, TrainingText, continue_windows, join_texts, train_drafter

__all__ = ["ENGINE", "LOSSES", "POSITION_WEIGHTS", "Continuation", "Conventions", "DrafterModule", "Drafts", "Roots"]
__all__ += ["TargetReading", "Trained", "TrainingOptions", "TrainingText", "continue_texts", "continue_windows"]
__all__ += ["estimate_acceptance", "feature_states", "join_texts", "label_column", "load_target", "read_eagle3"]
__all__ += ["read_out", "read_target", "train_drafter"]
