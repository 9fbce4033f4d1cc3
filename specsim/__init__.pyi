# Public names for editors and type checkers; at run time __init__.py imports each when it is first used.
from specsim import course as course
from specsim import plots as plots
from specsim import simulator as simulator
from specsim import training as training
from specsim.core.config import SamplingParams as SamplingParams
from specsim.core.config import ServingConfig as ServingConfig
from specsim.core.config import SpecConfig as SpecConfig
from specsim.core.engine_options import EngineOptions as EngineOptions
from specsim.core.errors import InputError as InputError
from specsim.core.pair import Pair as Pair
from specsim.core.rule import AcceptanceRule as AcceptanceRule
from specsim.core.rule import Accepted as Accepted
from specsim.core.token_drafter import NgramConfig as NgramConfig
from specsim.core.token_drafter import Proposal as Proposal
from specsim.core.token_drafter import SuffixConfig as SuffixConfig
from specsim.core.token_drafter import TokenDrafter as TokenDrafter
from specsim.core.token_drafter import TreeLimits as TreeLimits
from specsim.explorer.explore import explore as explore
from specsim.explorer.rounds import trace as trace
from specsim.models.draft_limits import DraftWindow as DraftWindow
from specsim.models.draft_vocabulary import DraftVocabulary as DraftVocabulary
from specsim.models.load import load as load
from specsim.serving.generation import generate as generate
from specsim.serving.generation import load_engine as load_engine
from specsim.serving.outputs import Generation as Generation
from specsim.serving.outputs import Output as Output
from specsim.serving.requests import make_request as make_request
from specsim.serving.scheduler import Scheduler as Scheduler

__version__: str
