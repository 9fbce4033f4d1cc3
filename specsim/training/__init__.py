"""Training of EAGLE heads for a target: features, unrolled loss, a short training, and an estimate of acceptance."""

from specsim.training.building import HeadSizes, build_head, copy_last_layer, read_eagle3, write_head
from specsim.training.continuation import Continuation, continue_texts
from specsim.training.conventions import ENGINE, Conventions, feature_states, label_column, read_out
from specsim.training.estimate import estimate_acceptance
from specsim.training.heads import Eagle3Head, EagleHead, Features, Head
from specsim.training.target import load_target
from specsim.training.train import Trained, TrainingOptions, join_texts, train_head
from specsim.training.unroll import read_features, unroll, unrolled_loss

__all__ = ["ENGINE", "Continuation", "Conventions", "Eagle3Head", "EagleHead", "Features", "Head", "HeadSizes"]
__all__ += ["Trained", "TrainingOptions", "build_head", "continue_texts", "copy_last_layer", "estimate_acceptance"]
__all__ += ["feature_states", "join_texts", "label_column", "load_target", "read_eagle3", "read_features", "read_out"]
__all__ += ["train_head", "unroll", "unrolled_loss", "write_head"]
