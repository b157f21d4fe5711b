"""The numbers by which the native module knows types and reductions."""

import torch

# Memory without a type.
BYTES = 0
# Those of poseidon_core::Dtype.
DTYPES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
# Of poseidon_core::ReduceOp, whose others have names in torch.distributed only, which a torch may lack.
SUM = 0
MEAN = 1
