"""Describes a PyTorch model to the planner: its layers in forward order, as JSON.

``python -m poseidon.describe MODULE:FACTORY`` prints what ``poseidon plan --model FILE`` reads. ``FACTORY()`` returns a
model, or a model and an example of its input whose first dimension is the batch.
"""

import argparse
import importlib
import json
import os
import sys
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from poseidon.torch._layers import factorable

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


def describe(model: nn.Module, name: str, inputs: Tuple[Any, ...]) -> Dict[str, Any]:
    """The layers of ``model`` as it runs on ``inputs``: every module with trainable parameters of its own.

    FLOPs are per sample, two for a multiplication with its addition, counted by what convolutions and matrix products
    are called with. What is computed outside of a layer, such as attention, counts for the layer before it. Backward
    takes twice as many, for the gradients of the weights and of the input; in the first layer, which needs no gradient
    of its input, once as many.
    """
    samples = next(t.shape[0] for t in inputs if isinstance(t, Tensor))
    trace = _Trace(model)
    with trace, torch.no_grad():
        model(*inputs)
    layers = [_layer(trace, entry, samples) for entry in trace.in_order()]
    for index, layer in enumerate(layers):
        layer["backward_flops"] = layer["forward_flops"] * (1 if index == 0 else 2)
    shape = next(list(t.shape[1:]) for t in inputs if isinstance(t, Tensor))
    return {"name": name, "input": shape, "layers": layers}


def dumps(model: Dict[str, Any]) -> str:
    """A model as JSON with a line for each layer, so that errors can name it and changes can be read."""
    head = {key: value for key, value in model.items() if key != "layers"}
    lines = ",\n".join(json.dumps(layer, separators=(",", ":")) for layer in model["layers"])
    return json.dumps(head, separators=(",", ":"))[:-1] + ',"layers":[\n' + lines + "\n]}\n"


class _Entry:
    """One layer: the module, and what its calls have shown."""

    def __init__(self, name: str, module: nn.Module, parameters: int):
        self.name = name
        self.module = module
        self.parameters = parameters
        self.flops = 0
        self.rows = 0
        self.input: Optional[torch.Size] = None


class _Trace(TorchDispatchMode):
    """Runs a model and notes which layer is called when, with what, and how much it computes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.factored = {id(m) for m in factorable(model)}
        self.entries: "OrderedDict[int, _Entry]" = OrderedDict()
        self.called: List[int] = []
        self.current: List[_Entry] = []
        self.hooks: List[Any] = []
        seen: Set[int] = set()
        for path, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
            seen.update(id(p) for p in own)
            if own:
                self.entries[id(module)] = _Entry(path or "model", module, sum(p.numel() for p in own))
                self.hooks.append(module.register_forward_pre_hook(self._enter))
                self.hooks.append(module.register_forward_hook(self._leave))

    def _enter(self, module: nn.Module, args: Tuple[Any, ...]) -> None:
        entry = self.entries[id(module)]
        source = next((a for a in args if isinstance(a, Tensor)), None)
        if source is not None:
            entry.input = entry.input or source.shape
            if isinstance(module, nn.Linear):
                entry.rows += source.numel() // max(source.shape[-1], 1)
        if id(module) not in self.called:
            self.called.append(id(module))
        self.current.append(entry)

    def _leave(self, module: nn.Module, args: Tuple[Any, ...], output: Any) -> None:
        self.current.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        entry = self.current[-1] if self.current else self.entries[self.called[-1]] if self.called else None
        if count is not None and entry is not None:
            entry.flops += count(*args, **(kwargs or {}), out_val=out)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def in_order(self) -> List[_Entry]:
        """Layers as they are called first. Those that never are, such as a projection whose weight somebody else
        uses, follow the one they are registered after. Norms belong to the convolution before them: they are small
        and ready together with it."""
        order: List[int] = list(self.called)
        before = None
        for key in self.entries:
            if key not in order:
                order.insert(order.index(before) + 1 if before is not None else 0, key)
            before = key
        kept: List[_Entry] = []
        for key in order:
            entry = self.entries[key]
            if kept and isinstance(entry.module, _NORMS) and isinstance(kept[-1].module, _CONVOLUTIONS):
                kept[-1].parameters += entry.parameters
                kept[-1].flops += entry.flops
            else:
                kept.append(entry)
        return kept


def _layer(trace: _Trace, entry: _Entry, samples: int) -> Dict[str, Any]:
    module = entry.module
    layer: Dict[str, Any] = {
        "name": entry.name,
        "kind": "other",
        "parameters": entry.parameters,
        "rows": 1,
        "forward_flops": entry.flops // samples,
        "backward_flops": 0,
    }
    if id(module) in trace.factored:
        layer["kind"] = {"fc": {"m": module.out_features, "n": module.in_features}}
        layer["rows"] = max(entry.rows // samples, 1)
    elif isinstance(module, _CONVOLUTIONS):
        layer["kind"] = "conv"
        if type(module) is nn.Conv2d and entry.input is not None and module.padding_mode == "zeros":
            padding = module.padding if isinstance(module.padding, tuple) else (0, 0)
            layer["convolution"] = {
                "inputs": module.in_channels,
                "outputs": module.out_channels,
                "kernel": list(module.kernel_size),
                "stride": list(module.stride),
                "padding": list(padding),
                "groups": module.groups,
                "size": list(entry.input[-2:]),
            }
    elif isinstance(module, nn.Embedding):
        layer["kind"] = "embedding"
        layer["rows"] = entry.input.numel() // samples if entry.input is not None else 1
    return layer


def _load(reference: str) -> Any:
    module, _, factory = reference.partition(":")
    if not module or not factory:
        raise SystemExit(f"expected MODULE:FACTORY, such as mymodels:make_net, got '{reference}'")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), factory)
    except ModuleNotFoundError as error:
        raise SystemExit(f"cannot import '{module}': {error}")
    except AttributeError:
        raise SystemExit(f"module '{module}' has no '{factory}'")
    return made() if callable(made) and not isinstance(made, nn.Module) else made


def _example(shape: str) -> Tensor:
    """``3x224x224``, or ``128:int64`` for tokens."""
    sizes, _, dtype = shape.partition(":")
    try:
        kind = getattr(torch, dtype or "float32")
        return torch.zeros([2] + [int(size) for size in sizes.split("x")], dtype=kind)
    except (ValueError, AttributeError, TypeError, RuntimeError):
        raise SystemExit(f"expected the shape of one sample, such as 3x224x224 or 128:int64, got '{shape}'")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m poseidon.describe", description=__doc__.splitlines()[0])
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="returns a model, or (model, example input)")
    parser.add_argument("--input", metavar="SHAPE", help="one sample: 3x224x224, or 128:int64 for tokens")
    args = parser.parse_args()
    made = _load(args.factory)
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise SystemExit(f"{args.factory} gives a {type(model).__name__}, not a torch.nn.Module")
    if args.input:
        inputs = _example(args.input)
    if inputs is None:
        raise SystemExit(
            f"say what one sample looks like, such as --input 3x224x224, or let {args.factory} return (model, example input)"
        )
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if not any(isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] > 0 for t in inputs):
        raise SystemExit("the example input has no tensor with a batch in its first dimension")
    name = args.factory.partition(":")[2]
    try:
        # Without numbers: shapes are all that is needed.
        described = describe(model.to("meta"), name, tree_map_only(Tensor, lambda t: t.to("meta"), inputs))
    except Exception as error:  # what users' models raise is theirs to choose
        raise SystemExit(f"{args.factory} fails on its example input: {type(error).__name__}: {error}")
    if not described["layers"]:
        raise SystemExit(f"{args.factory} has no trainable parameters")
    sys.stdout.write(dumps(described))


if __name__ == "__main__":
    main()
