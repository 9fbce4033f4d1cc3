"""Limits of numbers in files and settings, more than anything real has, for models, acceptance and the simulator."""

MOST_LAYERS = 1024
MOST_EXPERTS = 4096
MOST_HEADS = 2**16
MOST_WIDTH = 2**24  # of hidden states, feed-forwards and vocabularies
MOST_STEPS = 1024  # of a round
MOST_RUNNING = 2**16  # requests of a batch
MOST_TOKENS = 2**31 - 1  # of a request or a pool: positions and slots are 32-bit integers
MOST_COUNT = 2**48  # of tokens, rounds or requests in a file
