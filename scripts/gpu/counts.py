"""How much is measured: alike for this engine and transformers, which share no other module."""

AFTER = 512  # tokens before a decoding
NUM_ROUNDS = 33
NUM_PROMPTS = 5
# A compiled step of transformers is compiled in its first round, and recorded as a graph in its
# second.
NUM_WARM_UPS = 3
