"""The run, the loop, optimizers, schedules, evaluation."""
