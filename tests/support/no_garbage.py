"""Imported first in pytest's processes and in the one that ranks are forked from: no garbage collection while modules
are imported, and a rare one afterwards. With Python's own thresholds it takes 4 % of the tests' time."""

import gc

gc.disable()
gc.set_threshold(10_000, 20, 50)
