"""Settings of n-gram and suffix drafters in tests."""

from specsim.core.token_drafter import NgramConfig, SuffixConfig
from specsim.models.synthetic.drafter import SyntheticLookup

NGRAM = SyntheticLookup(NgramConfig(), NgramConfig())
SUFFIX = SyntheticLookup(SuffixConfig(shared=False), SuffixConfig(offset=2.0))
