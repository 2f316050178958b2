"""Optimizers that people ask for and that do not train right under Lightning: the reason, and what to take."""

from __future__ import annotations

_CLOSURE = "its step needs a closure that runs forward and backward passes again"
_GRAPH = "it needs second derivatives, for which Lightning keeps no graph"
_PAST = "it changes weights in the backward pass, past Lightning's clipping, accumulation and scaling"
_RANDOM = "it draws random numbers of its own, by which the ranks of DDP diverge"
_UNDERFLOW = "in its format the small values of the second moments become zero, and single weights blow up"
_ANY = "lightning_tricks.SAMMixin or SAMCallback, with any optimizer of the table"
_8BIT = "'adamw8bit', which keeps as many bytes in a finer format"

LEFT_OUT = {
    "adahessian": (_GRAPH, "'adamw'"),
    "adalomo": (_PAST, "'adafactor'"),
    "adamuon": ("it is Muon with second moments of the orthogonalized steps", "'muon' with algo='adamuon'"),
    "adamw8bit_torchao": (_UNDERFLOW, _8BIT),
    "adamwfp8": (_UNDERFLOW, _8BIT),
    "asam": (_CLOSURE, _ANY),
    "gsam": (_CLOSURE, _ANY),
    "kron": (_RANDOM, "'soap'"),
    "lbfgs": (_CLOSURE, "'adamw', or return torch.optim.LBFGS itself, on one device in full precision"),
    "lomo": (_PAST, "'adafactor'"),
    "lookahead": ("it goes around another optimizer", "'lookahead_adamw', or 'lookahead_' before another name"),
    "offload_adamw": (
        "torchao's CPUOffloadOptimizer has no state that Lightning could move, and shows it other weights to clip",
        "'adamw' with strategy='zero2_offload_bf16' or 'fsdp2_offload_bf16'",
    ),
    "psgd": (_RANDOM, "'soap'"),
    "ranger": ("it is RAdam with Lookahead and centred gradients", "'lookahead_radam'"),
    "sam": (_CLOSURE, _ANY),
    "shampoo": ("its successor is SOAP, Adam in Shampoo's basis", "'soap'"),
    "sophia": (_GRAPH, "'lion'"),
    "wsam": (_CLOSURE, _ANY),
}
