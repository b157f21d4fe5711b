"""A small transformer that learns to continue a text, character by character.

    python char_transformer.py                           # the licence of this repository, one worker
    torchrun --nproc-per-node 2 char_transformer.py --text FILE
    poseidon launch -n 2 -- python char_transformer.py
    mpirun -n 2 python char_transformer.py

Its gradients are clipped, and with `--accumulate N` are those of N batches.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import poseidon.torch as psd

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE-APACHE"


class Transformer(nn.Module):
    """The output layer is the embedding: one parameter, two uses."""

    def __init__(self, vocabulary, length, width=96, heads=4, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.position
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=LICENCE)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker")
    parser.add_argument("--length", type=int, default=64, help="characters in a sequence")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches for each update")
    args = parser.parse_args()

    psd.init()
    text = args.text.read_text()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])

    torch.manual_seed(1)
    # Masks are the same everywhere: there is no buffer to share.
    model = psd.DistributedDataParallel(Transformer(len(alphabet), args.length), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Every worker reads other places.
    generator = torch.Generator().manual_seed(psd.rank())
    start, recent = time.perf_counter(), []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for part in range(args.accumulate):
            at = torch.randint(len(tokens) - args.length, (args.batch,), generator=generator)
            window = torch.stack([tokens[i : i + args.length + 1] for i in at])
            last = part == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(window[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()) / args.accumulate
                loss.backward()
            recent.append(loss.item() * args.accumulate)
        # backward has returned, so gradients are everybody's mean: clipping gives the same on each worker.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if psd.rank() == 0 and (step % 20 == 0 or step == args.steps):
            seconds = time.perf_counter() - start
            print(f"step {step}: loss {sum(recent) / len(recent):.3f}, {seconds:.1f} s", flush=True)
            recent.clear()
    psd.shutdown()


if __name__ == "__main__":
    main()
