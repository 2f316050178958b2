"""Pictures of letters and digits in the fonts that come with matplotlib, of which some are seen in the test alone.

62 classes or fewer; each picture is drawn anew: of another size, place and slant, light on dark or dark on light, on
noise. The fonts of the test are of other families than those of training, a shift that is real; validation has those of
training.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_tricks.examples.tasks import Split

CHARACTERS = string.digits + string.ascii_letters
FONTS = {  # families of which matplotlib has the letters
    "train": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif"),
    "test": ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10", "cmtt10"),
}


@cache
def load_glyphs(size: int, train: int, other: int, characters: str = CHARACTERS) -> Split:
    """Pictures (N, 3, size, size) of mean 0 and standard deviation 1, about, and their characters.

    Args:
        size: Pixels of a side.
        train: Pictures to train with.
        other: Pictures of validation, and as many of the test.
        characters: The classes.
    """
    generator = torch.Generator().manual_seed(0)
    parts = {"train": ("train", train), "val": ("train", other), "test": ("test", other)}
    return {part: drawn(FONTS[fonts], size, number, characters, generator) for part, (fonts, number) in parts.items()}


def drawn(
    fonts: tuple[str, ...], size: int, number: int, characters: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Pictures of random ones of the characters in random ones of the fonts."""
    import matplotlib
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    sizes = range(size // 2, size)
    known = {(font, each): ImageFont.truetype(str(folder / f"{font}.ttf"), each) for font in fonts for each in sizes}
    labels = torch.randint(len(characters), (number,), generator=generator)
    chosen = torch.randint(len(fonts), (number,), generator=generator).tolist()
    scales = torch.randint(sizes.start, sizes.stop, (number,), generator=generator).tolist()
    turns = (30 * torch.rand(number, generator=generator) - 15).tolist()
    moves = (torch.rand(number, 2, generator=generator) - 0.5).mul(size / 4).tolist()
    masks = torch.empty(number, 1, size, size)
    for place, label in enumerate(labels.tolist()):
        picture = Image.new("L", (size, size))
        centre = tuple(size / 2 + move for move in moves[place])
        font = known[fonts[chosen[place]], scales[place]]
        ImageDraw.Draw(picture).text(centre, characters[label], fill=255, font=font, anchor="mm")
        turned = picture.rotate(turns[place], resample=Image.Resampling.BILINEAR)
        masks[place, 0] = torch.from_numpy(numpy.asarray(turned, dtype="float32") / 255)
    colours = torch.randn(2, number, 3, 1, 1, generator=generator)
    noise = 0.5 * torch.randn(number, 3, size, size, generator=generator)
    return colours[0] + (colours[1] - colours[0]) * masks + noise, labels
