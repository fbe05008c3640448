"""A trainer that knows nothing of plantune, with a small BERT: as with eager, and from plans.

Written as Hugging Face's and Lightning's are: the model returns its loss and its logits in a
dataclass, batches are dicts, the last one is smaller, gradients are accumulated and clipped, the
learning rate follows a schedule, and every epoch ends with an evaluation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.backend import pieces

WORDS, LENGTH, WIDTH, HEADS = 20, 6, 16, 4
Batch = dict[str, Tensor]


@dataclass
class ModelOutput:
    loss: Tensor | None
    logits: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        read = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = self.norms[0](x + self.dropout(self.out(read.transpose(1, 2).flatten(2))))
        return self.norms[1](x + self.dropout(self.down(F.gelu(self.up(x)))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> ModelOutput:
        x = self.words(input_ids) + self.places(torch.arange(LENGTH, device=input_ids.device))
        mask = attention_mask[:, None, None, :] > 0
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x[:, 0].tanh())
        return ModelOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


class Trainer:
    def __init__(self, model: nn.Module, batches: list[Batch]) -> None:
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 8)
        self.log: list[float] = []

    def train(self, epochs: int, accumulated: int = 2) -> None:
        for _ in range(epochs):
            self.model.train()
            for step, batch in enumerate(self.batches, 1):
                loss = self.model(**batch).loss / accumulated
                loss.backward()
                self.log.append(loss.item())
                if step % accumulated == 0:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            self.log.append(self.evaluate())

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        return sum(self.model(**batch).loss.item() for batch in self.batches)


def batches() -> list[Batch]:
    found = []
    for size in (8, 8, 8, 5):
        words = torch.randint(0, WORDS, (size, LENGTH))
        mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (size, 1))).long()
        found.append({"input_ids": words, "attention_mask": mask, "labels": words[:, 0] % 2})
    return found


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_as_with_eager(place):
    data = [{k: v.to(place) for k, v in batch.items()} for batch in batches()]
    model = Classifier().to(place)
    logs = []
    for backend in ("eager", "plantune"):
        torch.manual_seed(1)  # dropout draws the same numbers
        trained = copy.deepcopy(model)
        trained.compile(backend=backend)
        trainer = Trainer(trained, data)
        trainer.train(epochs=3)
        logs.append(torch.tensor(trainer.log))
    if place == "cpu":
        torch.testing.assert_close(*logs, rtol=1e-4, atol=1e-5)
    assert logs[1][-1] < 0.95 * logs[1][len(data)]  # it learns, from evaluation to evaluation
    planned, eager = map(sum, zip(*(piece.stats() for piece in pieces()), strict=True))
    assert planned >= 24
    assert planned >= 0.9 * (planned + eager)
