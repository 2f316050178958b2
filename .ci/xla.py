"""Run the tests of ``tests/xla``: every trick on a device of torch_xla, in an environment of its own.

It is made in .venv-xla/ and kept: 7 GB, as torch_xla is for the torch that has CUDA. What was found goes to
benchmarks/results/xla.json and docs/compatibility.md.

    python .ci/xla.py            all tricks, on the host's CPU; PJRT_DEVICE=TPU for a real one
    python .ci/xla.py -k EMA     these, as pytest chooses them
"""

from __future__ import annotations

import json
import sys

from environments import PYTEST, ROOT, made, pip, run, versions

sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix  # needs the standard library alone, as this file does

ENVIRONMENT = ROOT / ".venv-xla"
# torch_xla does not say which torch it was built for: that of the same number. torchao 0.17 needs a later one.
PINS = ["torch==2.9.*", "torch_xla==2.9.*", "torchao<0.17", "lightning!=2.6.2,!=2.6.3"]
PACKAGES = ["--editable", ".[pytorch-lightning,plot,lora,8bit,optimizers]", "numpy", "pytest"]
REPORTED = ("torch", "torch_xla", "lightning")

if __name__ == "__main__":
    python, stamp, report = made(ENVIRONMENT), ENVIRONMENT / ".made", ENVIRONMENT / "found.json"
    if not stamp.exists():
        print("installing torch_xla and what the tests need", flush=True)
        pip(python, *PINS, *PACKAGES)
        stamp.touch()
    report.unlink(missing_ok=True)
    failed = run(python, *PYTEST, "--confcutdir=tests/xla", "tests/xla", "--xla", report, *sys.argv[1:], check=False)
    if report.exists():
        known = json.loads(matrix.XLA.read_text()) if matrix.XLA.exists() else {}
        numbers, found = versions(python, *REPORTED), json.loads(report.read_text())
        if known.get("versions") == numbers:  # else what is known says nothing of these
            found = {**known["tricks"], **found}
        matrix.XLA.write_text(json.dumps({"versions": numbers, "tricks": dict(sorted(found.items()))}, indent=1) + "\n")
        matrix.PAGE.write_text(matrix.page())
    sys.exit(failed)
