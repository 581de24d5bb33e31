"""Imported first in the process that ranks are forked from: no garbage collection while modules are imported."""

import gc

gc.disable()
