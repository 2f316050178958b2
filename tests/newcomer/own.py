"""Thirty lines of a newcomer's own, without any trick: what the README's diff is applied to."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return optimizer


x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
train, val = random_split(data, [1400, 397], generator=torch.Generator().manual_seed(0))
epochs = 55
trainer = L.Trainer(max_epochs=epochs)
trainer.fit(Net(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=397))
trainer.save_checkpoint("net.ckpt")
print("accuracy:", trainer.callback_metrics["val_accuracy"].item())
