"""A contrastive batch in chunks: GradCacheMixin beside the whole batch at once, the gradcache package, and by hand.

All contenders train the same network on the same batch in a stock Trainer. Peers have manual optimization:
``gradcache`` (the package of the paper's authors; skipped where it is not installed), and the two passes as one would
write them.
Memory is the peak of a fit beyond weights and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from fitted import Batch, Net, fit
from rows import Row, figure, ratio, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import fits, in_turns
from torch import Tensor, nn

import lightning_tricks as lt

NAME = "grad_cache"
PEERS = ()
WHOLE, OURS, PEER, HAND = "the whole batch", "lightning_tricks GradCacheMixin", "gradcache", "two passes by hand"
MIB = 2**20


class Embedder(Net):
    """Two views of a sample, embedded by one network."""

    chunk = 64

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.net(batch[0]), self.net(batch[1])

    def contrast(self, one: Tensor, other: Tensor) -> Tensor:
        return lt.info_nce(one, other)

    def training_step(self, batch: Batch) -> Tensor:
        return self.contrast(*self.embed(batch))


class OursNet(lt.GradCacheMixin, Embedder):
    """In chunks; the step is the mixin's."""

    chunk = Embedder.chunk
    training_step = lt.GradCacheMixin.training_step


class ByHand(Embedder):
    """The two passes without random numbers, buffers, precision and ranks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Batch) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.gradient(batch)
        optimizer.step()

    def gradient(self, batch: Batch) -> None:
        chunks = list(zip(*(part.split(self.chunk) for part in batch), strict=True))
        with torch.no_grad():
            parts = [self.embed(chunk) for chunk in chunks]
        embeddings = [torch.cat(several).requires_grad_() for several in zip(*parts, strict=True)]
        self.manual_backward(self.contrast(*embeddings))
        gradients = [embedding.grad.split(self.chunk) for embedding in embeddings]
        for chunk, *of_chunk in zip(chunks, *gradients, strict=True):
            pairs = zip(self.embed(chunk), of_chunk, strict=True)
            self.manual_backward(sum((embedding * gradient).sum() for embedding, gradient in pairs))


class PeerNet(ByHand):
    """By the package, which takes the two views as those of two models."""

    def gradient(self, batch: Batch) -> None:
        from gradcache.grad_cache import GradCache

        cache = GradCache([self.net, self.net], self.chunk, self.contrast)
        cache(*batch)


CONTENDERS: dict[str, type[Net]] = {WHOLE: Embedder, OURS: OursNet, HAND: ByHand, PEER: PeerNet}


def network(width: int, depth: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 64))


def run(settings: Settings) -> list[Row]:
    """Time of a step, and memory."""
    samples: int = settings.pick("samples", 1024, 512, 128)
    width: int = settings.pick("width", 512, 256, 32)
    depth: int = settings.pick("depth", 8, 4, 2)
    settings.noted["chunk"] = Embedder.chunk
    torch.manual_seed(SEED)
    batch: Any = tuple(torch.randn(samples, width, device=settings.device) for _ in range(2))

    def step(kind: type[Net], steps: int) -> float:
        torch.manual_seed(SEED)
        return fit(kind(network(width, depth)), batch, steps, every=1)

    known = {name: kind for name, kind in CONTENDERS.items() if name != PEER or find_spec(PEER)}
    case = f"step, {samples} samples"
    timed: dict[str, Callable[[], float]] = {name: partial(step, kind, 5) for name, kind in known.items()}
    note = "skipped: not installed (python -m pip install gradcache)"
    found = rows_of(case, in_turns(fits(timed), settings.pick("fits", 9, 2, 1), warm_up=0), WHOLE, "ms")
    found += [Row(case, name, "ms", None, note=note) for name in CONTENDERS if name not in known]
    for name, kind in known.items():
        torch.manual_seed(SEED)
        module = kind(network(width, depth)).to(settings.device)
        taken, _ = memory(partial(fit, module, batch, 3, every=1), settings.device, MIB)
        found.append(row("peak memory", name, [taken["peak"]], "MiB"))
    return [*found, *(Row("peak memory", name, "MiB", None, note=note) for name in CONTENDERS if name not in known)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By what one would write by hand, and by the memory of the batch at once."""
    case = rows[0].case
    ours, hand = (figure(rows, case, what) for what in (OURS, HAND))
    less = ratio(figure(rows, "peak memory", OURS), figure(rows, "peak memory", WHOLE))
    return [
        target("step over two passes by hand", ratio(ours, hand), "<=", 1.15),
        target("memory over that of the whole batch", less, "<=", 0.5),
    ]
