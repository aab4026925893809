"""`python -m batchdecode`: the command without its script."""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the current folder: what lies there is data

from .main import main

main()
