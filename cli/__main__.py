"""`python -m batchdecode`: the command without its script."""

from .start import main

main()
