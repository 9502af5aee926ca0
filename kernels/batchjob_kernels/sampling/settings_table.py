"""The table of sampling settings on a device: one row of 32-bit words per slot, so that one copy sends all of a row.

`table` is int32 [slots, WIDTH], contiguous; the same memory is read as float32 and, for TOP_P, as float64.
"""

from __future__ import annotations

GROUP = 256  # token ids per group of the two-level draw; four of them share a Philox counter
TOKEN_LEVEL, GROUP_LEVEL = 0, 1  # third word of the Philox counter
KEY_LOW, KEY_HIGH = 0, 1  # of the random stream
TOP_P = 2  # float64, two words; below 1: in use
TOP_K = 4  # 0: not in use
MIN_TOKENS = 5
MAX_OUTPUT = 6  # output tokens at which the row is over
TEMPERATURE = 7  # float32, as are all that follow; 0: greedy
MIN_P = 8
REPETITION = 9
PRESENCE = 10
FREQUENCY = 11
WIDTH = 12

# A row's entry in the table of token counts is int32: bit 0 says "seen", the rest is the count in the output.
SEEN, ONE_OUTPUT = 1, 2
NO_STOP = -2  # fills the table of stop tokens; no token, nor the -1 of a row without one
