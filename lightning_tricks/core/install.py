"""Where this package lives and what installs it: the one place that says so to messages, notebooks and README."""

REPOSITORY = "https://github.com/lightning-tricks/lightning_tricks"
SOURCE = " @ git+https://github.com/lightning-tricks/lightning_tricks"  # empty as soon as a release is on PyPI


def pip_install(extras: str) -> str:
    """The command that installs the package with some extras.

    >>> pip_install("lora,8bit").removesuffix(f"{SOURCE}'")
    "pip install 'lightning-tricks[lora,8bit]"
    """
    return f"pip install 'lightning-tricks[{extras}]{SOURCE}'"
