"""Turns garbage collection off while modules are imported and makes it rare afterwards: it takes 4 % of tests' time.

Imported first in pytest's processes and in the process that ranks are forked from.
"""

import gc

gc.disable()
gc.set_threshold(10_000, 20, 50)
