"""The commands of the command line, a module each; specsim.cli.main registers them."""
