"""What a plan takes for parts of a run that only a GPU with its library has; told wherever a plan is shown."""

import argparse


def stand_ins(args: argparse.Namespace) -> tuple[str, ...]:
    """In words, for the validated arguments of a run; see build_flex_dispatcher."""
    if args.num_experts is None or args.moe_token_dispatcher_type != "flex":
        return ()
    return (
        f"--moe-flex-dispatcher-backend {args.moe_flex_dispatcher_backend} is planned with the rows of "
        "--moe-token-dispatcher-type alltoall, which fills the same buffers: what the library keeps for itself, and "
        "what it does not send twice, is not known without it",
    )
