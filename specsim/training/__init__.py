"""Training of EAGLE heads for a target: features, unrolled loss, a short training, and an estimate of acceptance."""

from specsim.training.building import load_target, read_eagle3, write_head
from specsim.training.estimate import continue_texts, estimate_acceptance
from specsim.training.train import TrainingOptions, join_texts, train_head
from specsim.training.unroll import ENGINE, Conventions, feature_states, label_column, read_features, read_out

__all__ = ["ENGINE", "Conventions", "TrainingOptions", "continue_texts", "estimate_acceptance", "feature_states"]
__all__ += ["join_texts", "label_column", "load_target", "read_eagle3", "read_features", "read_out", "train_head"]
__all__ += ["write_head"]
