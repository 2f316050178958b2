"""What every trick must do in the module of another project: equal something that was computed without it.

A model of a project is a class that inherits from ``Client``, and with it a test for each trick. The oracles compare
whole fits bit for bit where the trick is at its no-op limit, and the gradients of the first optimizer step, before the
model's own optimizer makes signs of them, where it does something.
"""

from __future__ import annotations

from tests.clients.of_batches import OfBatches
from tests.clients.of_fits import OfFits
from tests.clients.of_networks import OfNetworks
from tests.clients.of_weights import OfWeights

__all__ = ["Client"]


class Client(OfFits, OfNetworks, OfBatches, OfWeights):
    """A model of a project, with all tests; pytest begins with those of the last class."""
