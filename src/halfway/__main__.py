"""`python -m halfway` is the command `halfway`."""

import sys

from .lab.cli import main

sys.exit(main())
