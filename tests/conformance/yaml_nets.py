"""Modules that configuration files name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import lightning_tricks as lt
from tests.callbacks.test_distill import other
from tests.callbacks.test_moe_balance import with_experts
from tests.conformance.trick import (
    as_masks,
    convolve,
    embed,
    filled,
    in_chunks,
    lean,
    spoil_first_batch,
    spoil_last_epoch,
    stepped,
    widen,
)
from tests.nets import NormNet


class SharpNet(lt.SAMMixin, NormNet):
    """Takes SAM's settings from a configuration file."""

    def __init__(self, sam: lt.SAM | None = None, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.sam = sam or lt.SAM()


class ChunkedNet(lt.GradCacheMixin, NormNet):
    """Takes the size of a chunk from a configuration file."""

    def __init__(self, chunk: int = 32, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.chunk = chunk

    embed, contrast = in_chunks(0)["embed"], in_chunks(0)["contrast"]


class MixtureNet(NormNet):
    """Has a mixture of experts."""

    def __init__(self, lr: float = 0.1) -> None:
        with_experts(NormNet, self)


class ImagesNet(NormNet):
    """Gets images of two rows."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].unflatten(1, (2, 4)), batch[1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


class MasksNet(ImagesNet):
    """Has a mask of each image as target."""

    on_after_batch_transfer = as_masks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., None, None] * x[:, None]


class GrowingNet(NormNet):
    """Gets sequences that grow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(filled(x))


class GrowingImagesNet(ImagesNet):
    """Gets images that grow to two rows."""

    def forward(self, x: Tensor) -> Tensor:
        return NormNet.forward(self, filled(x))


class FreeNet(NormNet):
    """Has a schedule-free optimizer."""

    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_sgd", self, 0.05)


class SteppedNet(NormNet):
    """Has a schedule of its own."""

    def configure_optimizers(self) -> Any:
        return stepped(super().configure_optimizers(), self)


class LeanNet(NormNet):
    """Computes its loss without logits."""

    def __init__(self, lr: float = 0.1) -> None:
        lean(NormNet, self)


class ConvNet(NormNet):
    """Has convolutions."""

    def __init__(self, lr: float = 0.1) -> None:
        convolve(NormNet, self)


class WideNet(NormNet):
    """Has a layer with 16 inputs and outputs."""

    def __init__(self, lr: float = 0.1) -> None:
        widen(NormNet, self)


class TokensNet(NormNet):
    """Has an embedding of tokens."""

    def __init__(self, lr: float = 0.1) -> None:
        embed(NormNet, self)


class SpoiledNet(NormNet):
    """Meets a sample that is not finite."""

    on_before_batch_transfer = spoil_last_epoch


class StoppedNet(NormNet):
    """Meets one until it goes on from what was left."""

    on_before_batch_transfer = spoil_first_batch


class OtherTeacher(nn.Module):
    """The teacher of the tests' data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = other()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
