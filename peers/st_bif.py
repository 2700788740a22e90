"""The ST-BIF neuron in PyTorch: a loop over time, eager and compiled.

SpikingJelly's kernel is timed too where it is installed.

The same equations as the workload: h = v + x; spike +1 at h >= θ while c < Tmax, -1 at h < 0 while
c > Tmin; v = h - θ·spike; c += spike. The backward reads the membranes and
tracers that the forward saved.
"""
import torch

import common

THETA = 0.5


def forward(x, top, bottom):
    v = torch.full_like(x[0], 0.5 * THETA)
    c = torch.zeros_like(v)
    spikes, membranes, tracers = [], [], []
    for current in x:
        h = v + current
        membranes.append(h)
        tracers.append(c)
        spike = ((h >= THETA) & (c < top)).to(x.dtype) - ((h < 0) & (c > bottom)).to(x.dtype)
        v = h - THETA * spike
        c = c + spike
        spikes.append(spike)
    return torch.stack(spikes), torch.stack(membranes), torch.stack(tracers)


def bell(z, width):
    sigma = 0.405 * width
    return torch.exp(z * z / (-2 * sigma * sigma)) / width


def backward(membranes, tracers, gy, top, bottom):
    grad_v, grad_c = torch.zeros_like(gy[0]), torch.zeros_like(gy[0])
    grads = []
    for t in range(gy.shape[0] - 1, -1, -1):
        h, c = membranes[t], tracers[t]
        a = bell(h - THETA, THETA) * (c < top) + bell(-h, THETA) * (c > bottom)
        b = -((h >= THETA) * bell(top - c, 1.0) + (h < 0) * bell(c - bottom, 1.0))
        m = gy[t] - THETA * grad_v + grad_c
        grad_v = grad_v + m * a
        grad_c = grad_c + m * b
        grads.append(grad_v)
    return torch.stack(grads[::-1])


def spikingjelly(x, top):
    from spikingjelly.activation_based import functional
    from spikingjelly.activation_based.neuron.spikezip import STBIFNode

    node = STBIFNode(THETA, level=8, sym=False, pos_max=top, neg_min=0, step_mode="m").cuda()

    def launch():
        functional.reset_net(node)
        with torch.no_grad():
            return node(x)

    return launch


def peers(workload, axes):
    if workload not in ("st_bif/forward", "st_bif/backward"):
        return
    if axes.get("spikes") == "packed" or "n" not in axes:
        return
    n, t, top = int(axes["n"]), int(axes["t"]), int(axes["level"]) // 2 - 1

    def prepare(compiled):
        torch.manual_seed(0)
        x = 0.5 * torch.randn(t, n, device="cuda", dtype=common.DTYPES[axes["dtype"]])
        wrap = torch.compile if compiled else lambda function: function
        if workload == "st_bif/forward":
            run = wrap(lambda: forward(x, top, 0)[0])
            return run
        _, membranes, tracers = forward(x, top, 0)
        gy = torch.randn_like(x)
        return wrap(lambda: backward(membranes, tracers, gy, top, 0))

    yield "torch/eager", "a loop over time", lambda: prepare(False)
    yield "torch/compile", "torch.compile of the loop", lambda: prepare(True)
    if workload == "st_bif/forward":
        x = lambda: 0.5 * torch.randn(t, n, device="cuda", dtype=common.DTYPES[axes["dtype"]])
        yield "spikingjelly", "STBIFNode, its Triton kernel", lambda: spikingjelly(x(), top)


common.main(peers)
