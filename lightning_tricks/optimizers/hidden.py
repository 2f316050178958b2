"""The hidden weights of a network: matrices between its embeddings and its output layer."""

from __future__ import annotations

from torch import Tensor, nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase)
_HEADS = ("head", "lm_head", "classifier", "fc_out", "score", "embed_out", "decoder_out")


def is_hidden(module: nn.Module) -> set[Tensor]:
    """The weights of layers with two or more dimensions, without embeddings, weights tied to them and output layers.

    The output layer is the one that is called ``head``, ``lm_head``, ``classifier`` or the like, or else the last.
    Parameters that are no layer's weight (class tokens, position embeddings) are not hidden either.

    Example:
        >>> network = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
        >>> is_hidden(network) == {network[1].weight}
        True
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _LAYERS) or type(layer).__name__ == "Conv1D"  # that of transformers, as in GPT-2
    }
    heads = [layer for name, layer in layers.items() if any(part in _HEADS for part in name.split("."))]
    outputs = heads or list(layers.values())[-1:]
    left = {weight for layer in outputs for weight in layer.parameters(recurse=False)}
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            left.add(layer.weight)
    return {
        weight
        for layer in layers.values()
        for name, weight in layer.named_parameters(recurse=False)
        if "weight" in name and weight.ndim >= 2 and weight not in left
    }


def is_matrix(weight: Tensor) -> bool:
    """Whether a hidden weight is a matrix that can be orthogonalized, by the rule of timm's Muon.

    The filters of a convolution are the rows. A vector, a filter of a single channel, and what has fewer than 4 rows or
    columns or is more than 128 times as long as wide, are not.

    Example:
        >>> is_matrix(nn.Conv2d(8, 8, 3).weight), is_matrix(nn.Conv2d(8, 8, 3, groups=8).weight)
        (True, False)
    """
    if weight.ndim < 2 or 1 in weight.shape[:2]:
        return False
    sides = sorted((weight.shape[0], weight.shape[1:].numel()))
    return sides[0] >= 4 and sides[1] <= 128 * sides[0]
