"""`python -m mmlda`, which is how torchrun starts it."""

import os
import sys

from mmlda.cli import main

try:
    main()
except SystemExit as done:
    if "WORLD_SIZE" not in os.environ or not isinstance(done.code, int):
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(done.code)  # gloo's threads sometimes abort the end of the interpreter
