"""A corpus of hostile files and folders: each makes a marker as soon as anything of it runs.

``make(root)`` writes all of them. Some would also write outside of the folder that they are read from, fill the memory,
or keep a reader waiting for ever.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import runpy
import shutil
import sqlite3
import struct
import subprocess
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.faults.pickles import CRAFTED, behind

Made = Path
Maker = Callable[[Path, Path], Made]  # the path to write to without a suffix, and the marker -> what was written

STATE = {"w": torch.ones(2, 2), "b": torch.zeros(2)}


class Calls:
    """Is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def checkpoint(**changes: Any) -> dict[str, Any]:
    """What Lightning saves amid a fit."""
    loops = {"fit_loop": {"epoch_progress": {"total": {"processed": 1}}}}
    plain = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.0", "state_dict": STATE, "loops": loops}
    return {**plain, "callbacks": {}, "optimizer_states": [], "lr_schedulers": [], **changes}


# -- pickles: what is called ------------------------------------------------------------------------------------------


def script(mark: Path) -> str:
    path = mark.parent.parent / "helpers" / f"{mark.name}.py"
    path.write_text(f"open({str(mark)!r}, 'w')")
    return str(path)


def inner(mark: Path) -> bytes:
    return pickle.dumps(Calls(os.mkdir, str(mark)))


def saved(mark: Path) -> str:
    path = mark.parent.parent / "helpers" / f"{mark.name}.pt"
    torch.save(Calls(os.mkdir, str(mark)), path)
    return str(path)


CALLS: dict[str, Callable[[Path], Calls]] = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "os.mkdir": lambda mark: Calls(os.mkdir, str(mark)),
    "os.symlink": lambda mark: Calls(os.symlink, "/", str(mark)),
    "subprocess": lambda mark: Calls(subprocess.check_output, ["touch", str(mark)]),
    "exec": lambda mark: Calls(exec, f"open({str(mark)!r}, 'w')"),
    "eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Calls(open, str(mark), "w"),
    "Path.touch": lambda mark: Calls(Path.touch, mark),
    "shutil": lambda mark: Calls(shutil.copyfile, __file__, str(mark)),
    "logging": lambda mark: Calls(logging.FileHandler, str(mark)),
    "runpy": lambda mark: Calls(runpy.run_path, script(mark)),
    "sqlite": lambda mark: Calls(sqlite3.connect, str(mark)),
    "zipfile": lambda mark: Calls(zipfile.ZipFile, str(mark), "w"),
    "torch.save": lambda mark: Calls(torch.save, 1, str(mark)),
    "torch.load": lambda mark: Calls(partial(torch.load, weights_only=False), saved(mark)),
    "pickle.loads": lambda mark: Calls(pickle.loads, inner(mark)),
    "getattr": lambda mark: Calls(getattr, Calls(__import__, "os"), "system"),
    "a function of torch": lambda mark: Calls(torch.set_default_dtype, torch.float16),
}


def in_zip(call: Callable[[Path], Calls], path: Path, mark: Path) -> Made:
    torch.save(checkpoint(callbacks={"trap": call(mark)}), file := path.with_suffix(".ckpt"))
    return file


def in_legacy(call: Callable[[Path], Calls], path: Path, mark: Path) -> Made:
    made = checkpoint(callbacks={"trap": call(mark)})
    torch.save(made, file := path.with_suffix(".ckpt"), _use_new_zipfile_serialization=False)
    return file


def in_pickle(call: Callable[[Path], Calls], path: Path, mark: Path) -> Made:
    (file := path.with_suffix(".ckpt")).write_bytes(pickle.dumps(checkpoint(callbacks={"trap": call(mark)}), 2))
    return file


# -- pickles: how it is called ----------------------------------------------------------------------------------------


def _text(value: object) -> bytes:
    data = str(value).encode()
    return b"X" + struct.pack("<I", len(data)) + data


OPCODES: dict[str, Callable[[Path], bytes]] = {
    "GLOBAL REDUCE": lambda mark: b"cos\nmkdir\n(" + _text(mark) + b"tR.",
    "INST": lambda mark: b"(" + _text(mark) + b"ios\nmkdir\n.",
    "OBJ": lambda mark: b"(cos\nmkdir\n" + _text(mark) + b"o.",
    "STACK_GLOBAL": lambda mark: b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93(" + _text(mark) + b"tR.",
    "a dotted name": lambda mark: b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93(" + _text(mark) + b"tR.",
    "NEWOBJ": lambda mark: b"\x80\x02clogging\nFileHandler\n" + _text(mark) + b"\x85\x81" + _handler(mark) + b".",
    "NEWOBJ_EX": lambda mark: b"\x80\x04clogging\nFileHandler\n" + _text(mark) + b"\x85}\x92" + _handler(mark) + b".",
    "BUILD": lambda mark: b"\x80\x02cos\nmkdir\n(" + _text(mark) + b"tR}X\x01\x00\x00\x00aK\x01sb.",
    "an extension": lambda mark: b"\x80\x02\x82\xf0(" + _text(mark) + b"tR.",
    "PERSID": lambda mark: b"P__import__('os').mkdir('" + str(mark).encode() + b"')\n.",
    "BINPERSID": lambda mark: b"(X\x07\x00\x00\x00storagecos\nmkdir\n" + _text(mark) + b"X\x03\x00\x00\x00cpuK\x01tQ.",
    "a persistent name": lambda mark: b"(X\x07\x00\x00\x00storagecbuiltins\neval\n" + _text(mark) + b"NK\x01tQ.",
    "a later object": lambda mark: b"\x80\x02}.cos\nmkdir\n(" + _text(mark) + b"tR.",
    "a loop": lambda mark: b"\x80\x02]q\x00h\x00a}X\x0a\x00\x00\x00state_dicth\x00s.",
    "depth": lambda mark: b"\x80\x02" + b"]" * 20000 + b"a" * 19999 + b".",
    "a long string": lambda mark: b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "many bytes": lambda mark: b"\x80\x04cbuiltins\nbytearray\n\x8a\x07" + struct.pack("<Q", 2**52)[:7] + b"\x85R.",
}


def _handler(mark: Path) -> bytes:
    return b"clogging\nFileHandler.__init__\n(K\x00" + _text(mark) + b"tR"


def archive(pickled: bytes, path: Path, **records: bytes) -> Made:
    """A zip file such as torch writes."""
    with zipfile.ZipFile(file := path.with_suffix(".ckpt"), "w") as opened:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **records}.items():
            opened.writestr(f"archive/{name}", content)
    return file


# -- programs and archives of other kinds -----------------------------------------------------------------------------


class Program(torch.nn.Module):
    """Writes a file as soon as it is loaded."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.w = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, Tensor, bool]:
        return self.mark, self.w, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, Tensor, bool]) -> None:
        self.mark, self.w, self.training = state[0], state[1], state[2]
        torch.save(state[1], state[0])


def program(path: Path, mark: Path) -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.script(Program(str(mark))).save(file := path.with_suffix(".ckpt"))
    return file


def tar_of_torch(path: Path, mark: Path) -> Made:
    """The format before torch 0.1.10, in which torch extracts files; one is a link to the outside."""
    with tarfile.open(file := path.with_suffix(".ckpt"), "w") as opened:
        for name in ("storages", "tensors"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, str(mark)
            opened.addfile(link)
        data = pickle.dumps(Calls(os.mkdir, str(mark)))
        pickled = tarfile.TarInfo("pickle")
        pickled.size = len(data)
        opened.addfile(pickled, io.BytesIO(data))
    return file


def tar_to_the_outside(path: Path, mark: Path) -> Made:
    with tarfile.open(file := path.with_suffix(".ckpt"), "w:gz") as opened:
        entry = tarfile.TarInfo(f"../../{mark.name}")
        opened.addfile(entry, io.BytesIO(b""))
    return file


def plain_pickle(**changes: Any) -> bytes:
    """The ``data.pkl`` of a checkpoint without tensors."""
    return pickle.dumps(checkpoint(state_dict={}, **changes), 2)


def zip_to_the_outside(path: Path, mark: Path) -> Made:
    return archive(plain_pickle(), path, **{f"../../../{mark.name}": b"", f"{mark}": b""})


def zip_with_links(path: Path, mark: Path) -> Made:
    file = archive(plain_pickle(), path)
    with zipfile.ZipFile(file, "a") as opened:
        link = zipfile.ZipInfo("archive/data/0")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        opened.writestr(link, str(mark))
    return file


def compressed(path: Path, mark: Path) -> Made:
    """A hundred MiB of zeros in a hundred kB."""
    with zipfile.ZipFile(file := path.with_suffix(".ckpt"), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
        opened.writestr("archive/data.pkl", plain_pickle(state_dict_of=1))
        opened.writestr("archive/data/0", bytes(100 * 2**20))
    return file


def compressed_pickle(path: Path, mark: Path) -> Made:
    with zipfile.ZipFile(file := path.with_suffix(".ckpt"), "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("archive/data.pkl", b"\x80\x02" + b"]0" * 2**20 + plain_pickle()[2:])
    return file


def overlapping(path: Path, mark: Path) -> Made:
    """Many records that are one and the same."""
    file = archive(plain_pickle(), path, **{"data/0": bytes(2**20)})
    content = file.read_bytes()
    with zipfile.ZipFile(file) as opened:
        start, last = opened.start_dir, opened.infolist()[-1]
    entries, end = content[start:-22], content[-22:]
    entry = entries[-(46 + len(last.filename)) :]
    fields = list(struct.unpack("<4s4H2LH", end))
    fields[3] = fields[4] = fields[3] + 9999
    fields[5] += 9999 * len(entry)
    file.write_bytes(content[:start] + entries + entry * 9999 + struct.pack("<4s4H2LH", *fields))
    return file


def nested(path: Path, mark: Path) -> Made:
    hidden = in_zip(CALLS["os.mkdir"], path.with_name(f"{path.name}-inner"), mark).read_bytes()
    return archive(plain_pickle(), path, **{"data/0": hidden, "constants.zip": hidden})


def without_pickle(path: Path, mark: Path) -> Made:
    with zipfile.ZipFile(file := path.with_suffix(".ckpt"), "w") as opened:
        opened.writestr("archive/other.pkl", inner(mark))
    return file


def huge_tensor(path: Path, mark: Path) -> Made:
    """A tensor that says to have 2^60 elements."""
    torch.save(checkpoint(), buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as opened:
        records = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
    pickled = records.pop("data.pkl").replace(b"K\x02K\x02\x86", b"\x8a\x08" + struct.pack("<q", 2**60) + b"K\x02\x86")
    return archive(pickled, path, **records)


ARCHIVES: dict[str, Maker] = {
    "a program": program,
    "a tar of torch": tar_of_torch,
    "a tar to the outside": tar_to_the_outside,
    "a zip to the outside": zip_to_the_outside,
    "a zip with links": zip_with_links,
    "a compressed zip": compressed,
    "a compressed pickle": compressed_pickle,
    "overlapping records": overlapping,
    "nested archives": nested,
    "no pickle": without_pickle,
    "a huge tensor": huge_tensor,
}

# -- hyperparameters --------------------------------------------------------------------------------------------------

OF_CLI = "lightning.pytorch.cli.instantiate_module"


def called(mark: Path) -> dict[str, Any]:
    return {"class_path": "logging.FileHandler", "init_args": {"filename": str(mark)}}


HYPERPARAMETERS: dict[str, Callable[[Path], dict[str, Any]]] = {  # entries of a checkpoint
    "an instantiator": lambda mark: {"hyper_parameters": {"_instantiator": "os.mkdir", "path": str(mark)}},
    "an instantiator of a module": lambda mark: {"hyper_parameters": {"_instantiator": "logging.FileHandler"}},
    "no instantiator's name": lambda mark: {"hyper_parameters": {"_instantiator": ["os", "mkdir"]}},
    "a class": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "_class_path": "os.mkdir"}},
    "a class path": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "net": called(mark)}},
    "a class path of Any": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "any": called(mark)}},
    "a class path in a list": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "net": [1, called(mark)]}},
    "a class path in a tuple": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "any": (called(mark),)}},
    "a class path in depth": lambda mark: {
        "hyper_parameters": {"_instantiator": OF_CLI, "net": {"a": [{"b": ({"c": called(mark)},)}]}}
    },
    "a class path in init_args": lambda mark: {
        "hyper_parameters": {
            "_instantiator": OF_CLI,
            "net": {"class_path": "torch.nn.Identity", "dict_kwargs": {"a": called(mark)}},
        }
    },
    "as LightningCLI saves them": lambda mark: {
        "hyper_parameters": {
            "_instantiator": OF_CLI,
            "_class_path": "tests.faults.test_corpus.Open",
            "net": called(mark),
            "any": [called(mark)],
        }
    },
    "ordered": lambda mark: {"hyper_parameters": OrderedDict(_instantiator=OF_CLI, net=OrderedDict(called(mark)))},
    "without an instantiator": lambda mark: {"hyper_parameters": {"net": called(mark)}},
    "the old key": lambda mark: {"hparams": {"_instantiator": "os.mkdir", "path": str(mark)}},
    "the oldest key": lambda mark: {"module_arguments": {"_instantiator": OF_CLI, "net": called(mark)}},
    "pairs": lambda mark: {"hparams": [("_instantiator", "os.mkdir"), ("path", str(mark))]},
    "in one argument": lambda mark: {
        "hyper_parameters": {"_instantiator": OF_CLI, "x": called(mark)},
        "hparams_name": "net",
    },
    "as text": lambda mark: {"hyper_parameters": {"_instantiator": OF_CLI, "net": json.dumps(called(mark))}},
    "a type": lambda mark: {"hyper_parameters": {"net": 1}, "hparams_type": Tensor},
    "of data": lambda mark: {"datamodule_hyper_parameters": {"_instantiator": OF_CLI, "net": called(mark)}},
}


def with_hyperparameters(make: Callable[[Path], dict[str, Any]], path: Path, mark: Path) -> Made:
    torch.save(checkpoint(**make(mark)), file := path.with_suffix(".ckpt"))
    return file


# -- safetensors ------------------------------------------------------------------------------------------------------


def safetensors(header: object, path: Path, mark: Path) -> Made:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (file := path.with_suffix(".safetensors")).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    return file


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SAFETENSORS: dict[str, Maker] = {
    "a pickle": lambda path, mark: safetensors(inner(mark), path, mark),
    "an offset outside": lambda path, mark: safetensors({"w": {**_ENTRY, "data_offsets": [0, 2**40]}}, path, mark),
    "a huge shape": lambda path, mark: safetensors({"w": {**_ENTRY, "shape": [2**60, 2**60]}}, path, mark),
    "no JSON": lambda path, mark: safetensors(b"__import__('os')", path, mark),
    "a name of a file": lambda path, mark: safetensors({f"../../{mark.name}": _ENTRY}, path, mark),
    "a huge header": lambda path, mark: _write(path, ".safetensors", struct.pack("<Q", 2**62)),
    "a checkpoint": lambda path, mark: in_zip(CALLS["os.mkdir"], path, mark).rename(path.with_suffix(".safetensors")),
}


def _write(path: Path, suffix: str, content: bytes | str) -> Made:
    file = path.with_suffix(suffix)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# -- links, pipes, and texts ------------------------------------------------------------------------------------------


def link(path: Path, mark: Path) -> Made:
    target = in_zip(CALLS["os.mkdir"], path.with_name(f"{path.name}-target"), mark)
    (file := path.with_suffix(".ckpt")).symlink_to(target.name)
    return file


def link_to_nothing(path: Path, mark: Path) -> Made:
    (file := path.with_suffix(".ckpt")).symlink_to(mark)
    return file


def link_to_itself(path: Path, mark: Path) -> Made:
    (file := path.with_suffix(".ckpt")).symlink_to(file.name)
    return file


def pipe(path: Path, mark: Path) -> Made:
    os.mkfifo(file := path.with_suffix(".ckpt"))
    return file


_TAGS = "!!python/object/apply:os.mkdir [{}]"
ODD: dict[str, Maker] = {
    "a link": link,
    "a link to nothing": link_to_nothing,
    "a link to itself": link_to_itself,
    "a pipe": pipe,
    "nothing": lambda path, mark: _write(path, ".ckpt", b""),
    "a YAML with tags": lambda path, mark: _write(path, ".yaml", "model: " + _TAGS.format(mark)),
    "a YAML with tags as a checkpoint": lambda path, mark: _write(path, ".ckpt", _TAGS.format(mark)),
    "a JSON of transformers": lambda path, mark: _write(
        path, ".json", json.dumps({"model_type": "bert", "architectures": ["logging.FileHandler"]})
    ),
    "a JSON that names a function": lambda path, mark: _write(
        path, ".json", json.dumps({"model_type": "bert", "architectures": ["pipeline"]})
    ),
    "a JSON with code": lambda path, mark: _write(
        path, ".json", json.dumps({"model_type": "bert", "auto_map": {"AutoModel": f"{mark}--a.B"}})
    ),
}

# -- folders of shards ------------------------------------------------------------------------------------------------


def fsdp2(path: Path) -> Made:
    """A folder as Lightning writes it under FSDP2."""
    folder = path.with_suffix(".ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save({"state_dict": {**STATE, "extra": ["note"]}}, checkpoint_id=folder, no_dist=True)
    torch.save(checkpoint(state_dict={}), folder / "meta.pt")
    return folder


def with_metadata(change: Callable[[bytes, Path], bytes], path: Path, mark: Path) -> Made:
    file = (folder := fsdp2(path)) / ".metadata"
    file.write_bytes(change(file.read_bytes(), mark))
    return folder


def elsewhere(place: str, content: bytes, mark: Path) -> bytes:
    """The metadata with the shards in another file."""
    return content.replace(_text("__0_0.distcp"), _text(place)).replace(
        b"\x8c\x0c__0_0.distcp", b"\x8c" + bytes([len(place)]) + place.encode()
    )


def with_a_program(path: Path, mark: Path) -> Made:
    folder = fsdp2(path)
    program(path.with_name(f"{path.name}-program"), mark).replace(folder / "meta.pt")
    return folder


def with_a_call_in_meta(path: Path, mark: Path) -> Made:
    torch.save(checkpoint(callbacks={"trap": CALLS["os.mkdir"](mark)}), (folder := fsdp2(path)) / "meta.pt")
    return folder


def with_an_instantiator_in_meta(path: Path, mark: Path) -> Made:
    torch.save(checkpoint(**HYPERPARAMETERS["an instantiator"](mark)), (folder := fsdp2(path)) / "meta.pt")
    return folder


def with_a_call_in_averages(path: Path, mark: Path) -> Made:
    averages = (folder := fsdp2(path)) / "averages" / "EMA(decay=0.5)"
    averages.mkdir(parents=True)
    (averages / ".metadata").write_bytes(inner(mark))
    return folder


def with_a_call_in_shards(path: Path, mark: Path) -> Made:
    """A value that is no tensor becomes a call, behind the others."""
    folder = fsdp2(path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if "extra" in index.fqn)
    with (folder / metadata.storage_data[index].relative_path).open("ab") as file:
        metadata.storage_data[index].offset = file.tell()
        torch.save(CALLS["os.mkdir"](mark), file)
        metadata.storage_data[index].length = file.tell() - metadata.storage_data[index].offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def zero(path: Path, mark: Path, tag: str = "checkpoint", trap: Any = None) -> Made:
    """What looks like a folder of ZeRO-3 by one rank, with a call in it."""
    (states := (folder := path.with_suffix(".ckpt")) / "checkpoint").mkdir(parents=True)
    (folder / "latest").write_text(tag)
    call = CALLS["os.mkdir"](mark) if trap is None else trap
    torch.save({**checkpoint(), "module": {}, "trap": call}, states / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}, "trap": call}, states / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def zero_with_a_program(path: Path, mark: Path) -> Made:
    folder = zero(path, mark, trap=0)
    for number, file in enumerate(sorted(folder.glob("checkpoint/*.pt"))):
        program(path.with_name(f"{path.name}-{number}"), mark).replace(file)
    return folder


FOLDERS: dict[str, Maker] = {
    "a call in .metadata": lambda path, mark: with_metadata(lambda _, mark: inner(mark), path, mark),
    "a call behind .metadata": lambda path, mark: with_metadata(
        lambda content, mark: behind(OPCODES["GLOBAL REDUCE"](mark)[:-1], content), path, mark
    ),
    **{
        f"{name} in .metadata": lambda path, mark, crafted=crafted: with_metadata(  # type: ignore[misc]
            lambda content, _: behind(crafted, content), path, mark
        )
        for name, crafted in CRAFTED.items()
    },
    "shards above": lambda path, mark: with_metadata(
        lambda content, mark: elsewhere("../../secret", content, mark), path, mark
    ),
    "shards elsewhere": lambda path, mark: with_metadata(
        lambda content, mark: elsewhere("/etc/passwd", content, mark), path, mark
    ),
    "a program in meta.pt": with_a_program,
    "a call in meta.pt": with_a_call_in_meta,
    "an instantiator in meta.pt": with_an_instantiator_in_meta,
    "a call in averages": with_a_call_in_averages,
    "a call in shards": with_a_call_in_shards,
    "ZeRO": zero,
    "ZeRO that names a folder above": lambda path, mark: zero(path, mark, f"../{path.name}.ckpt/checkpoint"),
    "ZeRO that names a folder elsewhere": lambda path, mark: zero(path, mark, str(path)),
    "ZeRO of programs": zero_with_a_program,
}

CORPUS: dict[str, Maker] = {
    **{
        f"{name} in a {kind}": lambda path, mark, put=put, call=call: put(call, path, mark)  # type: ignore[misc]
        for kind, put in {"zip": in_zip, "legacy file": in_legacy, "pickle": in_pickle}.items()
        for name, call in CALLS.items()
    },
    **{
        f"{name} in data.pkl": lambda path, mark, code=code: archive(code(mark), path)  # type: ignore[misc]
        for name, code in OPCODES.items()
    },
    **ARCHIVES,
    **{
        f"hyperparameters: {name}": lambda path, mark, make=make: with_hyperparameters(make, path, mark)  # type: ignore[misc]
        for name, make in HYPERPARAMETERS.items()
    },
    **{f"safetensors: {name}": make for name, make in SAFETENSORS.items()},
    **ODD,
    **FOLDERS,
}


def make(root: Path) -> dict[str, Made]:
    """Write all of them, each into a folder of its own; ``root / "marks"`` stays without files as long as none runs."""
    for name in ("marks", "helpers"):
        (root / name).mkdir(parents=True)
    (root / "secret").write_bytes(b"outside of all folders")
    made = {}
    for number, (name, maker) in enumerate(CORPUS.items()):
        (root / "corpus" / str(number)).mkdir(parents=True)
        made[name] = maker(root / "corpus" / str(number) / "a", root / "marks" / f"mark{number}")
    return made
