"""The neurons of `resnet18.py` in Triton: all time steps of a layer in one kernel each way.

Forward, a program loops over the steps of its neurons; bias and residual are added on the way.
Backward, it replays them, keeps the spikes as two bits a step, and walks back: a membrane before a
step is the one behind it, with the spike put back and the current taken out.
"""
import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def forward_kernel(
    y, bias, residual, currents, values, n, channels,
    THETA: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, FED: tl.constexpr,
    JOINED: tl.constexpr, KEEP: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr,
):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    shift = tl.load(bias + at % channels, mask=inside, other=0.0).to(tl.float32)
    v = tl.full((SIZE,), 0.5 * THETA, tl.float32)
    c = tl.zeros((SIZE,), tl.float32)
    for t in tl.static_range(T):
        x = tl.load(y + t * n + at, mask=inside, other=0.0).to(tl.float32)
        if t < FED:
            x += shift
        if JOINED:
            x += tl.load(residual + t * n + at, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(y.dtype.element_ty)
        if KEEP:
            tl.store(currents + t * n + at, kept, mask=inside)
        h = v + kept.to(tl.float32)
        up = (h >= THETA) & (c < TOP)
        down = (h < 0) & (c > 0)
        s = tl.where(up, 1.0, tl.where(down, -1.0, 0.0))
        v = h - THETA * s
        c += s
        value = THETA * c if SUMS else THETA * s
        tl.store(values + t * n + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    currents, gradient, out, n,
    THETA: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, SUMS: tl.constexpr,
    SIZE: tl.constexpr,
):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    v = tl.full((SIZE,), 0.5 * THETA, tl.float32)
    c = tl.zeros((SIZE,), tl.float32)
    bits = tl.zeros((SIZE,), tl.int32)
    for t in tl.static_range(T):
        h = v + tl.load(currents + t * n + at, mask=inside, other=0.0).to(tl.float32)
        up = (h >= THETA) & (c < TOP)
        down = (h < 0) & (c > 0)
        s = tl.where(up, 1.0, tl.where(down, -1.0, 0.0))
        v = h - THETA * s
        c += s
        bits = bits | (tl.where(up, 1, tl.where(down, 2, 0)) << (2 * t))
    grad_v = tl.zeros((SIZE,), tl.float32)
    grad_c = tl.zeros((SIZE,), tl.float32)
    g = tl.zeros((SIZE,), tl.float32)
    for i in tl.static_range(T):
        t = T - 1 - i
        code = (bits >> (2 * t)) & 3
        s = tl.where(code == 1, 1.0, tl.where(code == 2, -1.0, 0.0))
        h = v + THETA * s
        c -= s
        v = h - tl.load(currents + t * n + at, mask=inside, other=0.0).to(tl.float32)
        own = THETA * tl.load(gradient + t * n + at, mask=inside, other=0.0).to(tl.float32)
        g = g + own if SUMS else own
        near = (h - THETA) / (0.405 * THETA)
        zero = h / (0.405 * THETA)
        a = tl.where(c < TOP, tl.exp(-0.5 * near * near), 0.0)
        a += tl.where(c > 0, tl.exp(-0.5 * zero * zero), 0.0)
        a = a / THETA
        full = (TOP - c) / 0.405
        empty = c / 0.405
        b = tl.where(h >= THETA, tl.exp(-0.5 * full * full), 0.0)
        b += tl.where(h < 0, tl.exp(-0.5 * empty * empty), 0.0)
        m = g - THETA * grad_v + grad_c
        grad_v += m * a
        grad_c -= m * b
        tl.store(out + t * n + at, grad_v.to(out.dtype.element_ty), mask=inside)


def forward(y, bias, residual, fed, theta, top, keep, sums):
    """Currents, if they are kept, and values, or their sums, of `[T, pixels, C]`."""
    y = y.contiguous()
    t, pixels, channels = y.shape
    n = pixels * channels
    values = torch.empty_like(y)
    currents = torch.empty_like(y) if keep else values
    joined = residual is not None
    residual = residual.contiguous() if joined else y
    forward_kernel[(triton.cdiv(n, BLOCK),)](
        y, bias, residual, currents, values, n, channels,
        THETA=theta, TOP=top, T=t, FED=fed, JOINED=joined, KEEP=keep, SUMS=sums, SIZE=BLOCK,
    )
    return currents if keep else None, values


def backward(currents, gradient, theta, top, sums):
    """Gradient of the currents from that of the values, or of their sums."""
    gradient = gradient.contiguous()
    out = torch.empty_like(currents)
    n = currents[0].numel()
    backward_kernel[(triton.cdiv(n, BLOCK),)](
        currents, gradient, out, n, THETA=theta, TOP=top, T=currents.shape[0], SUMS=sums, SIZE=BLOCK
    )
    return out
