"""The size of a transformer: its weights, its floating-point operations and what it keeps for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tricks.core.checks import check_bool, check_count

__all__ = ["TransformerShape"]


@dataclass(frozen=True)
class TransformerShape:
    """A decoder of equal layers, with an embedding and a head.

    Args:
        layers: The number of layers L.
        width: The width h of the residual stream.
        heads: The number of attention heads, which divides ``width``.
        vocabulary: The number of tokens V.
        sequence: The number of tokens s of a sample.
        key_heads: The number of heads of keys and values; None for ``heads``.
        hidden: The width of the feed-forward part; None for ``4 * width``.
        gated: Whether the feed-forward part has a third matrix, as SwiGLU has.
        tied: Whether the head is the embedding.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or ``heads`` does not divide ``width``.

    Example:
        >>> gpt3 = TransformerShape(layers=96, width=12288, heads=96, vocabulary=51200, sequence=2048, tied=True)
        >>> round(gpt3.parameters / 1e9)
        175
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    key_heads: int | None = None
    hidden: int | None = None
    gated: bool = False
    tied: bool = False

    @classmethod
    def of(cls, parameters: int, *, sequence: int = 4096) -> TransformerShape:
        """A usual shape of about so many weights: 128 times as wide as it has layers, and 32,000 tokens.

        Args:
            parameters: The number of weights, at least a million.
            sequence: The number of tokens of a sample.

        Raises:
            ValueError: If there are fewer weights.

        Example:
            >>> TransformerShape.of(7_000_000_000)
            TransformerShape(layers=34, width=4096, heads=32, vocabulary=32000, sequence=4096, key_heads=None, \
hidden=None, gated=False, tied=True)
        """
        check_count("parameters", parameters, least=10**6)
        wide = (128 * parameters / 12) ** (1 / 3)
        step = 1024 if wide > 1024 else 128  # so that devices of a node share heads evenly
        width = step * max(1, round(wide / step))
        layers = max(1, round((parameters - 32000 * width) / (12 * width**2)))
        return cls(layers, width, width // 128, 32000, sequence, tied=True)

    def activations(self, tensor: int = 1, *, recompute: bool = False) -> float:
        """Bytes of a sample's activations in bf16-mixed: ``s h (19 + 46 / t)`` in each layer, and 12 for each logit.

        So many does ``estimate_memory`` measure in a Llama of transformers. Megatron's kernels keep half of that, by
        the same rule: what lies between layers is not split.

        Args:
            tensor: The devices t that share each layer.
            recompute: Whether layers are computed again, which keeps their inputs in fp32, and one layer.

        References:
            Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.
        """
        layer = self.width * (19 + 46 / tensor)
        layers = 4 * self.width * self.layers + layer if recompute else self.layers * layer
        return self.sequence * (layers + 12 * self.vocabulary)

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "sequence"):
            check_count(name, getattr(self, name))
        for name in ("key_heads", "hidden"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_bool("gated", self.gated)
        check_bool("tied", self.tied)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads={self.heads} and width={self.width}.")

    @property
    def layer_weights(self) -> int:
        """The weights of a layer's matrices: queries, keys, values, outputs and the feed-forward part."""
        keys = (self.key_heads or self.heads) / self.heads
        attention = (2 + 2 * keys) * self.width**2
        return round(attention + (3 if self.gated else 2) * self.width * (self.hidden or 4 * self.width))

    @property
    def head_weights(self) -> int:
        """The weights of the head."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights but biases, positions and those of norms, a thousandth of them."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.head_weights

    @property
    def flops(self) -> int:
        """Operations of a token's forward and backward pass: ``6 (L w + V h) + 12 L h s`` with w weights a layer.

        The products of attention are counted in full, also where a causal kernel leaves out half of them: so do those
        who publish shares of the peak (MFU).
        """
        weights = self.layers * self.layer_weights + self.head_weights
        return 6 * weights + 12 * self.layers * self.width * self.sequence
