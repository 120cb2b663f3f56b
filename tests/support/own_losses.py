"""Objectives as users write them, for `objective: {file: own_losses.py, function: ...}`."""

import torch


def mean_of_tokens(token_losses):
    """The loss of `sft`."""
    return token_losses.sum(), "target_tokens"


def mean_of_answers(token_losses, num_targets):
    """Short answers count as much as long ones; the tokens' perplexity is a metric."""
    means = torch.stack([part.mean() for part in token_losses.split(num_targets)])
    return {
        "answers": (means.sum(), "sequences"),
        "confident": (0.1 * (token_losses * torch.exp(-token_losses.detach())).sum(), "target_tokens"),
        "certain": ((token_losses.detach() < 0.1).float().sum(), "target_tokens"),
    }
