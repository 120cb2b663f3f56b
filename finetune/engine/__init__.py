"""The only room that knows accelerate, FSDP, DeepSpeed and torch.distributed."""
