"""Linear layers whose weights lie as oneDNN multiplies them, on a processor.

torch hands a product of float32 to BLAS, which arranges the weight anew in every call; arranged
once, 16 rows take half the time, and no number of rows takes longer.
"""

import torch
from torch import nn

_NUM_ROWS = 16  # for which weights are arranged; products may have any number


class PackedLinear(nn.Module):
    """Does what an nn.Linear does, from its weight arranged.

    weight: of no size, with the dtype and the device that others ask it for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS)  # noqa: SLF001 - torch has no other name for it
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of x [..., in]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - as above
            x, self._packed, self._bias, "none", [], ""
        )
        return product


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers in a module, and forget their weights, where that is of use."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and _can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def _can_pack(weight: torch.Tensor) -> bool:
    """Return whether this torch, on this processor, multiplies such a weight arranged."""
    is_there = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return is_there and weight.device.type == "cpu" and weight.dtype == torch.float32
