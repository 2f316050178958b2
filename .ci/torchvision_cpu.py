"""Let a torchvision built for CUDA be imported beside a CPU-only torch. Environment repair, no part of the package.

timm needs torchvision. The package index's torchvision is built for CUDA: beside a CPU-only torch its compiled library
does not load, two operators stay undefined and `import torchvision` fails, and with it `import lightning`, torchmetrics
and transformers. Declaring the operators is enough to import; nothing here calls them. The declaration must wait for
torchvision, for torch is slow to import: a .pth file installs an import hook in every process of this environment.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = '''"""Declares two operators before torchvision is imported; see .ci/torchvision_cpu.py of lightning_tricks."""

import sys


class TorchvisionFinder:
    """Finds torchvision as ever, and declares the operators just before its code runs."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (declare(), run(module))
        return spec


def declare(libraries=[]):
    if not libraries:
        import torch

        libraries.append(torch.library.Library("torchvision", "FRAGMENT"))  # kept: operators die with their library
        libraries[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        libraries[0].define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, TorchvisionFinder)
'''


def error() -> str:
    """What `import torchvision` prints in a fresh process of this environment when it fails."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", "import torchvision"], capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else ""


if __name__ == "__main__":
    site = Path(sysconfig.get_path("purelib"))
    hook, pth = site / "_torchvision_cpu.py", site / "_torchvision_cpu.pth"
    for old in (hook, pth):  # beside a torch that no longer needs them, they would declare the operators twice
        old.unlink(missing_ok=True)
    if "operator torchvision::nms does not exist" in error():
        print("torchvision is built for CUDA, torch is not: declaring torchvision's missing operators")
        hook.write_text(HOOK)
        pth.write_text("import _torchvision_cpu\n")
    if message := error():
        sys.exit(f"error: torchvision cannot be imported beside the installed torch: {message.splitlines()[-1]}")
