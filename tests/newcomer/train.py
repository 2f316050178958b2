"""Handwritten digits, as a newcomer writes it: python train.py STRATEGY DEVICES EPOCHS FOLDER [CKPT_PATH]."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_tricks as lt


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def digits():
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    return random_split(data, [1200, 197, 400], torch.Generator().manual_seed(0))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_accuracy", self.accuracy(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", self.accuracy(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def accuracy(self, batch):
        x, y = batch
        return (self.net(x).argmax(-1) == y).float().mean()

    def configure_optimizers(self):
        return lt.cosine(lt.adamw(self, lr=5e-3), self, warmup=0.1, floor=0.5)


def main(strategy, devices, epochs, folder, ckpt_path=None):
    L.seed_everything(0)
    train, val, test = digits()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        max_epochs=int(epochs),
        callbacks=[
            lt.EMA(decay=0.98, warmup=False),
            ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_last=True),
        ],
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    net = Net()
    trainer.fit(net, DataLoader(train, 50, shuffle=True), DataLoader(val, 50), ckpt_path=ckpt_path)
    told = {"steps": trainer.global_step, "precision": trainer.precision}
    told |= {"fit": trainer.callback_metrics["val_accuracy"].item()}
    told |= {"validate": trainer.validate(net, DataLoader(val, 50), verbose=False)[0]["val_accuracy"]}
    told |= {"test": trainer.test(net, DataLoader(test, 50), verbose=False)[0]["test_accuracy"]}
    told |= {"logits": torch.cat(trainer.predict(net, DataLoader(test, 50))).float().tolist()}
    best = trainer.test(net, DataLoader(test, 50), ckpt_path="best", verbose=False)
    told |= {"best": best[0]["test_accuracy"], "best_path": trainer.checkpoint_callback.best_model_path}
    Path(folder, f"told-{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
