"""FlashAttention-4 (CuTe DSL), the third peer of attention.py where its wheels are installed.

Wheels for PyTorch 2.11 with CUDA 13, installed without their dependencies (264 MB unpacked):
flash-attn-4 4.0.0b36; nvidia-cutlass-dsl 4.8.1 with its -libs-base, -libs-core and -libs-cu13;
quack-kernels 0.6.5; apache-tvm-ffi 0.1.15.post2; torch-c-dlpack-ext 0.1.5. If they lie outside the
environment, PEER_SITE names their folders, separated as in PATH.

Kernels are compiled when a shape is first launched. `prepare` does so before anything is timed.
"""
import importlib.metadata
import importlib.util
import os
import site
import sys

import torch

import common

PACKAGE = "flash-attn-4"
COMPILE_SECONDS = 30

for folder in filter(None, os.environ.get("PEER_SITE", "").split(os.pathsep)):
    sys.path.insert(0, folder)
    site.addsitedir(folder)  # The DSL adds its own folder by a .pth file.


def installed():
    """Whether the package is there; its import takes seconds and happens in `prepare`."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def version():
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unpackaged"


def prepare(shapes, dtype, causal, backward):
    """What launches one problem; `shapes` are those of q, k and v as (b, h, s, d).

    The library takes tensors as (b, s, h, d). Its causal mask lets the last query see all keys.
    """
    torch.manual_seed(0)
    q, k, v = (
        torch.randn((b, s, h, d), device="cuda", dtype=dtype, requires_grad=backward)
        for b, h, s, d in shapes
    )
    with common.within(COMPILE_SECONDS):
        from flash_attn.cute import flash_attn_func

        def forward():
            out = flash_attn_func(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        out = forward()
        if not backward:
            launch = torch.no_grad()(forward)
        else:
            grad = torch.randn_like(out)
            launch = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        launch()
        torch.cuda.synchronize()
    return launch
