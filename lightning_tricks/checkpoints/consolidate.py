"""One file from a sharded checkpoint."""

from __future__ import annotations

from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, check_output, path_of, save
from lightning_tricks.checkpoints.folders import stored_weights
from lightning_tricks.checkpoints.stream import StoredTensor

__all__ = ["consolidate"]


def consolidate(checkpoint: PathLike, output: PathLike, *, force: bool = False) -> int:
    """Write the ``state_dict`` of a sharded checkpoint, a folder by FSDP2 or DeepSpeed ZeRO-1, 2 or 3, to one file.

    Each tensor is the parts of all ranks put together, bit for bit; under DeepSpeed, of the fp32 masters. They are read
    and written one after the other, so that memory holds the largest of them, not the model: on one process, without a
    GPU and without a process group. A torch file takes its space on the disk twice while it is written.

    What is written is what was validated: with ``EMA()`` in the Trainer the folder's ``state_dict`` holds the averages,
    and so does the file. Frozen weights and buffers have the dtypes in which they were saved, under DeepSpeed buffers
    at least fp32. Tied weights are written under each name; those of DeepSpeed stay tied in a torch file.

    Missing files and files cut short are found; checksums are not compared. Nothing in a folder is run: objects that
    could are refused.

    Args:
        checkpoint: The folder that Lightning saved.
        output: The file to write, as .safetensors or by ``torch.save``: .pt, .pth, .bin, .ckpt. It is whole or not
            there at all.
        force: Whether ``output`` may replace a file.

    Returns:
        The number of tensors in the file.

    Raises:
        ValueError: If the folder was not finished, is damaged or no checkpoint, or holds objects that could run code;
            for an unknown suffix of ``output``; if a .safetensors file cannot hold it.
        FileNotFoundError: If the checkpoint, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        NotADirectoryError: If the checkpoint is one file already: ``export_weights`` takes its weights.
        OSError: If the disk is full.
        ImportError: If safetensors, or deepspeed for one of its checkpoints, is missing.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp, warnings
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch says that there is no process group
        ...     _ = dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=f"{folder}/a.ckpt", no_dist=True)
        ...     torch.save({}, f"{folder}/a.ckpt/meta.pt")  # both as Lightning does under FSDP2
        ...     tensors = consolidate(f"{folder}/a.ckpt", f"{folder}/w.pt")
        ...     tensors, torch.load(f"{folder}/w.pt")
        (1, {'w': tensor([1., 1.])})
    """
    target, source = check_output(output, force=force), path_of("checkpoint", checkpoint)
    if source.is_file():
        raise NotADirectoryError(f"{source} is one file already: take its weights with lightning-tricks export.")
    if not source.is_dir():
        raise FileNotFoundError(f"There is no folder {source}.")
    state = stored_weights(source)
    save(state, target, force=force)
    return sum(isinstance(value, Tensor | StoredTensor) for value in state.values())
