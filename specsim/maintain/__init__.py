"""Commands that a maintainer runs from a checkout: training, mutation testing, tables."""
