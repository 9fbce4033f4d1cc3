"""python -m specsim: the command line."""

from specsim.cli import main

main()
