"""Mutation testing: python -m specsim.maintain.mutation.run_mutants"""
