"""The commands of the command line, a module each; specsim.cli registers them."""
