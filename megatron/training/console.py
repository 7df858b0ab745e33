"""What a run prints for its user goes through here; log lines of training steps are callbacks/console_log.py's."""

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Prints on the first rank only, at once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
