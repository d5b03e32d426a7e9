"""`python -m halfway` is the command `halfway`."""

import sys

from .cli import main

sys.exit(main())
