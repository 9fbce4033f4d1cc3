"""Language models as drafters: tensors with the names of a target, d2t and t2d where the vocabulary was another one."""

from collections.abc import Collection

from specsim.core.pair import DrafterCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.language_model import is_language_model, load_language_model, num_modules_of
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.model_config import model_config
from specsim.models.checkpoint.weights import Stored


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    return is_language_model(names)


def _layout(config: StandaloneConfig) -> DrafterLayout:
    """List the tensors of a whole language model, as of a target, with a head for the draft vocabulary."""
    layout = target_layout(config.model)
    layout["lm_head.weight"] = (config.draft_vocab_size, config.model.hidden_size)
    table = {"d2t": (config.draft_vocab_size,)}
    has_vocabulary = config.draft_vocab_size != config.model.vocab_size
    return DrafterLayout(layout | (table if has_vocabulary else {}), table | {"t2d": (config.model.vocab_size,)})


def _load(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    model = load_language_model(model_config(fields), fields.file.parent, stored, num_modules_of(fields))
    config = StandaloneConfig(model.config, model.config.vocab_size, target.hidden_size)
    return DrafterCheckpoint(config, model.tensors)


FORMAT = DrafterFormat(precedence=7, matches=_matches, load=_load, layout=_layout, is_language_model=True)
