"""Times every layer of a model on a device and prints a profile for `poseidon plan`.

    python measure.py --batch 32 --device cuda MODEL.json ... > mine.toml

Layers are built from the shapes in the model's file and timed alone, forward and backward, with random numbers; equal
ones once. A convolution has its batch norm, if the number of parameters says so, and a ReLU with it. What else a layer's
FLOPs contain, such as attention, is taken to run at the layer's own rate; layers of other kinds take their FLOPs at the
rate of matrix products. On a CUDA device copies to and from pinned memory are timed too. Only torch is needed.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import torch
from torch import nn

# A run between two readings of the clock is at least this long, in seconds: much longer than reading it.
RUN = 2e-3
# The median of so many runs is taken.
RUNS = 7
# A session copies gradients in pieces of this many bytes (PIECE in session/device.rs).
PIECE = 2 << 20
# Pieces of a run: much more than a cache holds.
PIECES = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.json")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="float32")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch must be at least 1")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"the device '{args.device}' cannot be used: {str(error).splitlines()[0]}")
    # The choice is the user's, not this version's of torch.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = True
    measure = Measure(torch.device(args.device), args.precision, args.batch)
    models = []
    for file in args.models:
        with open(file) as text:
            models.append(json.load(text))
        print(f"{models[-1]['name']}: {len(models[-1]['layers'])} layers", file=sys.stderr)
        measure.model(models[-1])
    print(f"device = {json.dumps(measure.device_name())}")
    measure.print_copies()
    measure.print_models(models)
    measure.print_rates(models)


class Measure:
    def __init__(self, device, precision, batch):
        self.device, self.precision, self.batch = device, precision, batch
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.seen = {}

    def device_name(self):
        kind, threads = self.device.type, ""
        if kind == "cuda":
            kind = torch.cuda.get_device_name(self.device)
        elif kind == "cpu":
            kind, threads = processor(), f", {torch.get_num_threads()} of its threads"
        return f"{kind}{threads}, torch {torch.__version__}, {self.precision}"

    def model(self, model):
        for index, layer in enumerate(model["layers"]):
            self.layer(layer, index == 0)

    def layer(self, layer, first=False):
        """Seconds forward and backward; None if the layer's shape is not known."""
        key = json.dumps([layer["kind"], layer.get("convolution"), layer["parameters"], layer.get("rows", 1), first])
        if key not in self.seen:
            built = self.build(layer)
            self.seen[key] = None if built is None else self.time(*built, first)
        return self.seen[key]

    def build(self, layer):
        options = {"device": self.device, "dtype": self.dtype}
        kind, shape = layer["kind"], layer.get("convolution")
        if isinstance(kind, dict):
            m, n = kind["fc"]["m"], kind["fc"]["n"]
            module = nn.Linear(n, m, bias=layer["parameters"] > m * n, **options)
            return module, torch.randn(self.batch * layer.get("rows", 1), n, **options)
        if kind == "conv" and shape:
            inputs, outputs, groups = shape["inputs"], shape["outputs"], shape["groups"]
            # Strided and padded by two numbers, as torch takes them.
            conv = nn.Conv2d(inputs, outputs, shape["kernel"], shape["stride"], shape["padding"], groups=groups, bias=False)
            besides = layer["parameters"] - conv.weight.numel()
            if besides == outputs:
                conv = nn.Conv2d(inputs, outputs, shape["kernel"], shape["stride"], shape["padding"], groups=groups)
            norm = [nn.BatchNorm2d(outputs)] if besides == 2 * outputs else []
            module = nn.Sequential(conv, *norm, nn.ReLU(inplace=True)).to(**options)
            return module, torch.randn(self.batch, inputs, *shape["size"], **options)
        return None

    def time(self, module, source, first):
        source.requires_grad_(not first)
        wanted = list(module.parameters()) + ([] if first else [source])
        with torch.no_grad():
            forward = self.seconds(lambda: module(source))
        output = module(source)
        gradient = torch.randn_like(output)
        backward = self.seconds(lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True))
        return forward, backward

    def seconds(self, work):
        work()
        once = max(self.run(work, 1), 1e-7)
        times = max(1, min(1000, round(RUN / once)))
        return statistics.median(self.run(work, times) / times for _ in range(RUNS))

    def run(self, work, times):
        self.wait()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return time.perf_counter() - begin

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy_speed(self, source, target):
        """Bytes per second from one tensor of bytes to another, in pieces."""
        pairs = list(zip(target.split(PIECE), source.split(PIECE), strict=True))

        def copy():
            for to, piece in pairs:
                to.copy_(piece, non_blocking=True)

        return source.numel() / self.seconds(copy)

    def copies(self):
        """Bytes per second to the host and to the device; None where the device's memory is not known to be its own."""
        if self.device.type != "cuda":
            return None
        host = torch.zeros(PIECE * PIECES, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(PIECE * PIECES, dtype=torch.uint8, device=self.device)
        return self.copy_speed(device, host), self.copy_speed(host, device)

    def print_copies(self):
        speeds = self.copies()
        if speeds is not None:
            print(f"\n[copies]\nto_host = {speeds[0]:.4g}\nto_device = {speeds[1]:.4g}")

    def rate(self, models, fits):
        """FLOPs per second over all timed layers that fit."""
        flops = seconds = 0.0
        for model in models:
            for index, layer in enumerate(model["layers"]):
                timed = self.layer(layer, index == 0)
                if timed is not None and fits(layer):
                    own, backward = own_flops(layer, self.batch, index == 0)
                    flops, seconds = flops + own + backward, seconds + sum(timed)
        return flops / seconds if seconds else None

    def rates(self, models):
        fc = self.rate(models, lambda layer: isinstance(layer["kind"], dict))
        conv = self.rate(models, lambda layer: layer["kind"] == "conv")
        return conv or fc, fc or conv

    def print_rates(self, models):
        conv, fc = self.rates(models)
        if conv is not None:
            print(f"\n[rates]\nconv = {conv:.4g}\nfc = {fc:.4g}\nother = {fc:.4g}\nfc_rows = {self.batch}")

    def print_models(self, models):
        _, product = self.rates(models)
        for model in models:
            print(f"\n[[measured]]\nmodel = {json.dumps(model['name'])}\nbatch = {self.batch}\nlayers = [")
            for index, layer in enumerate(model["layers"]):
                forward, backward = self.full(layer, index == 0, product)
                print(f"  [{json.dumps(layer['name'])}, {forward:.4g}, {backward:.4g}],")
            print("]")

    def full(self, layer, first, product):
        total = layer["forward_flops"] * self.batch
        back = layer.get("backward_flops", 2 * layer["forward_flops"]) * self.batch
        timed = self.layer(layer, first)
        if timed is None:
            return (total / product, back / product) if product else (0.0, 0.0)
        own, own_back = own_flops(layer, self.batch, first)
        more = max(total / own, 1.0) if own else 1.0
        return timed[0] * more, timed[1] * more


def processor():
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def own_flops(layer, batch, first):
    """What the layer that was timed computes by itself, forward and backward."""
    flops = layer["forward_flops"] * batch
    if isinstance(layer["kind"], dict):
        flops = 2.0 * layer["kind"]["fc"]["m"] * layer["kind"]["fc"]["n"] * layer.get("rows", 1) * batch
    return flops, flops * (1 if first else 2)


if __name__ == "__main__":
    main()
