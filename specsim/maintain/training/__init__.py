"""Training of the shipped pair: python -m specsim.maintain.training.train"""
