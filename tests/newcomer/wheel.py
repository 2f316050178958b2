"""What a stranger tries first with torch and the wheel alone: import, EMA, a fit. No repository, no extra."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt

assert "site-packages" in lt.__file__, f"{lt.__file__} is not the wheel's"


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return lt.flat_cos(torch.optim.SGD(self.parameters(), lr=0.1), self)


L.seed_everything(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32, shuffle=True)
with TemporaryDirectory() as folder:
    net, options = Net(), {"accelerator": "cpu", "default_root_dir": folder, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=3, callbacks=[lt.EMA()], **options)
    trainer.fit(net, loader)
    trainer.save_checkpoint(Path(folder) / "net.ckpt")
    saved = torch.load(Path(folder) / "net.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weight, saved[name]) for name, weight in net.state_dict().items())
    L.Trainer(strategy="single_bf16", max_epochs=1, **options).fit(Net(), loader)
listed = subprocess.run([sys.executable, "-m", "lightning_tricks_cli.main", "tricks"], capture_output=True, text=True)
assert "EMA" in listed.stdout, listed.stderr
print("the wheel works")
