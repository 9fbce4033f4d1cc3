"""python -m specsim: the command line."""

from specsim.cli.main import main

main()
