"""``python -m dsv4dbg``."""

from dsv4dbg.cli.main import main

main()
