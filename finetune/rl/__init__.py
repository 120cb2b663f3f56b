"""Samples of the model itself: rollouts, rewards, and the policy objectives that train on them."""
