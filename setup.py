"""pyproject.toml has everything; this file only gives an older Python an answer that it can understand.

pip would install what builds the package first, and stop because no such setuptools exists for it.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("titanmoe needs Python 3.10 or newer, and this is " + ".".join(map(str, sys.version_info[:3])))

from setuptools import setup

setup()
