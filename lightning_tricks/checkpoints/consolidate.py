"""Writing a sharded checkpoint to one file."""

from __future__ import annotations

from pathlib import Path

from lightning_tricks.checkpoints.files import PathLike, check_output, path_of, save

__all__ = ["consolidate"]


def consolidate(checkpoint: PathLike, output: PathLike, *, force: bool = False) -> Path:
    """Write the ``state_dict`` of a sharded checkpoint, a folder by FSDP2 or DeepSpeed ZeRO-1, 2 or 3, to one file.

    The shards of all ranks are joined bit for bit; under DeepSpeed, those of the fp32 master weights. Tensors are read
    and written one by one in one process, without a GPU and without a process group, so that memory holds the largest
    tensor, not the model. A torch file needs twice its size on the disk while it is written.

    The file has the weights that were validated: with ``EMA()`` in the Trainer these are the averages. Frozen weights
    and buffers keep the dtypes in which they were saved; under DeepSpeed buffers have at least fp32. Tied weights are
    written under each name; those of DeepSpeed stay tied in a torch file.

    Missing and truncated files are detected; checksums are not compared. Nothing in the folder is executed: objects
    that could run code are refused.

    Args:
        checkpoint: The checkpoint folder that Lightning saved.
        output: The file to write atomically, as .safetensors or with ``torch.save``: .pt, .pth, .bin, .ckpt.
        force: Whether ``output`` may replace a file.

    Returns:
        The path of the file, ``output``.

    Raises:
        ValueError: If the folder has adapters of ``LoRA``, is incomplete, damaged, not a checkpoint, or holds objects
            that could run code; if the suffix of ``output`` is unknown; if a .safetensors file cannot hold a value.
        FileNotFoundError: If the checkpoint, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        NotADirectoryError: If the checkpoint is one file already, for ``export_weights``.
        OSError: If the disk is full.
        ImportError: If safetensors, or deepspeed for a DeepSpeed checkpoint, is missing.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp, warnings
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns that there is no process group
        ...     _ = dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=f"{folder}/a.ckpt", no_dist=True)
        ...     torch.save({}, f"{folder}/a.ckpt/meta.pt")  # Lightning under FSDP2 writes both
        ...     torch.load(consolidate(f"{folder}/a.ckpt", f"{folder}/w.pt"))
        {'w': tensor([1., 1.])}
    """
    target, source = check_output(output, force=force), path_of("checkpoint", checkpoint)
    if source.is_file():
        raise NotADirectoryError(f"{source} is one file already: take its weights with lightning-tricks export.")
    if not source.is_dir():
        raise FileNotFoundError(f"There is no folder {source}.")
    from lightning_tricks.checkpoints.folders import lazy_weights, record_of

    state = lazy_weights(source)
    if record_of(source) is not None:
        raise ValueError(f"{source} has adapters of LoRA: merge them, lightning-tricks export --merge --base BASE.")
    save(state, target, force=force)
    return target
