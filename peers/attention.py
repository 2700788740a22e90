"""PyTorch's attention: FlashAttention-2 and cuDNN behind scaled_dot_product_attention; and
FlashAttention-4 where it is installed (flash_attention4.py).

The backward is timed without its forward.
"""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

import common
import flash_attention4

BACKENDS = (
    ("torch/flash2", "scaled_dot_product_attention, FlashAttention-2", SDPBackend.FLASH_ATTENTION),
    ("torch/cudnn", "scaled_dot_product_attention, cuDNN", SDPBackend.CUDNN_ATTENTION),
)


def peers(workload, axes):
    if workload not in ("attention/forward", "attention/backward") or axes["dtype"] in ("f32", "fp8"):
        return
    s, d = int(axes["s"]), int(axes["d"])
    b = int(axes.get("b", max(1, int(axes.get("tokens", 16384)) // s)))
    h, keys = int(axes.get("h", 2048 // d)), int(axes.get("keys", s))
    h_kv = int(axes.get("h_kv", h))
    causal, backward = axes["mask"] == "causal", workload == "attention/backward"
    shapes = ((b, h, s, d), (b, h_kv, keys, d), (b, h_kv, keys, d))
    dtype = common.DTYPES[axes["dtype"]]
    if flash_attention4.installed():
        yield (
            "flash-attention-4",
            f"flash_attn.cute, {flash_attention4.PACKAGE} {flash_attention4.version()}",
            lambda: flash_attention4.prepare(shapes, dtype, causal, backward),
        )
    if causal and keys != s:
        return  # PyTorch lets the first query see one key, here the last one sees all.

    def prepare(backend):
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes
        )

        def forward():
            with sdpa_kernel(backend):
                return attention(q, k, v, is_causal=causal, enable_gqa=h != h_kv)

        if not backward:
            return torch.no_grad()(forward)
        out = forward()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    for name, about, backend in BACKENDS:
        yield name, about, lambda backend=backend: prepare(backend)


common.main(peers)
