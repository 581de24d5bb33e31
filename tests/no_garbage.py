"""Imported first in the process that ranks are forked from: no collections while modules are imported."""

import gc

gc.disable()
