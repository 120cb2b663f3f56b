"""The plan and its parts (FLOPs, costs, hardware); `check`, `inspect`, `prepare`, `doctor`."""
