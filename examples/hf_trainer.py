"""The Hugging Face Trainer with halfway: a base class and one argument. Also under `torchrun --nproc-per-node 2`."""

from __future__ import annotations

import argparse

from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from digits import digits
from halfway.integrations.transformers import BlockingMixin


class BlockingTrainer(BlockingMixin, Trainer):
    pass


class Digits(Dataset):
    def __init__(self) -> None:
        self.data = digits()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        image, label = self.data[i]
        return {"pixel_values": image, "labels": label}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
trainer = BlockingTrainer(
    model=ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **size)),
    args=TrainingArguments(
        "digits",
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        logging_steps=25,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Digits(),
    blocking={"at": "vit.layers.0", "prune_ratio": 0.4},
)
trainer.train()

if trainer.is_world_process_zero():
    print(trainer.blocker.stats)
