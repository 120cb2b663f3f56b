"""Rewards of sampled answers: built-in functions, functions of the user's file, reward models and judges."""
