"""Makes reference/*.safetensors: losses and gradients of small nets, computed with PyTorch.

Needs torch and safetensors; run it in this folder after a change to the nets below. Each file holds the model as
TOML (metadata), images, labels, the loss and, for every layer with parameters, `<layer>.parameters` and
`<layer>.gradient`: weights, then biases.
"""

import math
import pathlib
import tomllib

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

SAMPLES = 3

# Between them: every kind of layer, kernels other than the stride, windows clipped at one or both ends, padding,
# strided convolutions below other layers, numbers of channels on both sides of vector lengths, images that are not
# square.
NETS = {
    "quick": [
        (3, 32, 32),
        dict(kind="conv", outputs=8, kernel=5, pad=2),
        dict(kind="pool", method="max", kernel=3, stride=2),
        dict(kind="relu"),
        dict(kind="conv", outputs=8, kernel=5, pad=2),
        dict(kind="relu"),
        dict(kind="pool", method="average", kernel=3, stride=2),
        dict(kind="conv", outputs=16, kernel=5, pad=2),
        dict(kind="relu"),
        dict(kind="pool", method="average", kernel=3, stride=2),
        dict(kind="fc", outputs=16),
        dict(kind="fc", outputs=10),
    ],
    "wide": [
        (3, 6, 7),
        dict(kind="conv", outputs=40, kernel=3, pad=1),
        dict(kind="relu"),
        dict(kind="lrn", alpha=0.5),
        dict(kind="pool", method="max", kernel=3, stride=2, pad=1),
        dict(kind="conv", outputs=33, kernel=3, stride=2, pad=1),
        dict(kind="fc", outputs=5),
    ],
    "strided": [
        (2, 13, 9),
        dict(kind="conv", outputs=18, kernel=3, stride=2, pad=1),
        dict(kind="pool", method="average", kernel=3, stride=2, pad=1),
        dict(kind="lrn", size=3, alpha=0.3, beta=0.6, k=2.0),
        dict(kind="conv", outputs=5, kernel=4, stride=3, pad=3),
        dict(kind="relu"),
        dict(kind="fc", outputs=4),
    ],
    "pools": [
        (1, 11, 14),
        dict(kind="conv", outputs=17, kernel=1),
        dict(kind="pool", method="max", kernel=2, stride=3),
        dict(kind="pool", method="average", kernel=2, stride=2, pad=1),
        dict(kind="conv", outputs=16, kernel=2),
        dict(kind="pool", method="max", kernel=2, stride=2),
        dict(kind="fc", outputs=3),
    ],
    "mlp": [
        (2, 3, 4),
        dict(kind="fc", outputs=21),
        dict(kind="relu"),
        dict(kind="fc", outputs=34),
        dict(kind="relu"),
        dict(kind="fc", outputs=6),
    ],
}


def main():
    torch.manual_seed(20170711)
    folder = pathlib.Path(__file__).parent / "reference"
    for name, (shape, *layers) in NETS.items():
        text = model(name, shape, layers)
        tensors = reference(tomllib.loads(text))
        save_file(tensors, folder / f"{name}.safetensors", metadata={"model": text})


def model(name, shape, layers):
    lines = [f'name = "{name}"', f"input = {list(shape)}", f"classes = {layers[-1]['outputs']}"]
    for i, layer in enumerate(layers):
        lines += ["", "[[layer]]", f'name = "{layer["kind"]}{i}"']
        lines += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in layer.items()]
    return "\n".join(lines) + "\n"


def reference(model):
    images = torch.randn(SAMPLES, *model["input"], dtype=torch.float64).float()
    labels = torch.randint(model["classes"], (SAMPLES,))
    tensors = {"images": images, "labels": labels.int()}
    parameters = {}
    # In double precision: what differs is the engine's rounding, not PyTorch's.
    x = images.double()
    for layer in model["layer"]:
        if layer["kind"] in ("conv", "fc"):
            inputs = x.shape[1] * layer["kernel"] ** 2 if layer["kind"] == "conv" else x[0].numel()
            weights = torch.randn(layer["outputs"], inputs) * math.sqrt(2 / inputs)
            bias = torch.randn(layer["outputs"]) * 0.1
            tensors[f"{layer['name']}.parameters"] = torch.cat([weights.flatten(), bias])
            parameters[layer["name"]] = [p.double().requires_grad_() for p in (weights, bias)]
        x = forward(layer, x, *parameters.get(layer["name"], []))
    loss = F.cross_entropy(x.flatten(1), labels)
    loss.backward()
    tensors["loss"] = loss.detach()
    for name, pair in parameters.items():
        tensors[f"{name}.gradient"] = torch.cat([p.grad.flatten() for p in pair]).float()
    return tensors


def forward(layer, x, weights=None, bias=None):
    match layer["kind"]:
        case "conv":
            kernel = weights.view(layer["outputs"], x.shape[1], layer["kernel"], layer["kernel"])
            return F.conv2d(x, kernel, bias, layer.get("stride", 1), layer.get("pad", 0))
        case "fc":
            return x.flatten(1) @ weights.T + bias
        case "relu":
            return x.clamp(min=0)
        case "lrn":
            size, k = layer.get("size", 5), layer.get("k", 1.0)
            squares = F.pad(x * x, (0, 0, 0, 0, size // 2, size // 2))
            sums = sum(squares[:, i : i + x.shape[1]] for i in range(size))
            return x / (k + layer.get("alpha", 1e-4) / size * sums) ** layer.get("beta", 0.75)
        case "pool":
            return pool(layer, x)


def pool(layer, x):
    """Window by window, as Caffe defines it, whatever PyTorch's own pooling does at the borders."""
    kernel, stride, pad = layer["kernel"], layer.get("stride", 1), layer.get("pad", 0)
    height, width = x.shape[2:]

    def windows(size):
        count = math.ceil((size + 2 * pad - kernel) / stride) + 1
        while (count - 1) * stride >= size + pad:
            count -= 1
        starts = [i * stride - pad for i in range(count)]
        return [(max(start, 0), min(start + kernel, size), min(start + kernel, size + pad) - start) for start in starts]

    rows = []
    for top, bottom, tall in windows(height):
        row = []
        for left, right, wide in windows(width):
            window = x[:, :, top:bottom, left:right].flatten(2)
            row.append(window.amax(2) if layer["method"] == "max" else window.sum(2) / (tall * wide))
        rows.append(torch.stack(row, 2))
    return torch.stack(rows, 2)


if __name__ == "__main__":
    main()
