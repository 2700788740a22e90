"""The action expert of pi0.5 in PyTorch, one step and the loop.

Peers: eager, eager in a CUDA graph, and with its parts compiled in a CUDA graph.

The same equations as the workload, as a PyTorch user writes them: styles are computed in every
step, activations have the dtype of the weights, the norms and the state are fp32, the time is fp64.
Weights and caches are random, with the workload's standard deviations; biases have the dtype of the
weights here. Each peer is compared with the same functions, eager, in fp32.

Three functions are compiled: before the layers, a layer, after the layers. Eighteen unrolled layers
would compile for minutes. Tuning tries tiles for every GEMM, which can matter from 16 rows on. It
ends after 25 s, so that the program takes a minute.
"""
import functools
import math
import sys

import torch
from torch.nn.functional import gelu, linear, silu
from torch.nn.functional import scaled_dot_product_attention as attention

import common

TUNING_SECONDS = 25
DEVICE = "cuda"
ACTION, STEP_TIME = 32, 0.7
# width, depth, mlp, heads, head_dim
MODELS = {"pi05": (1024, 18, 4096, 8, 256), "tiny": (64, 2, 128, 2, 16)}
# Relative L2 distance from fp32 that rounding explains, with room.
CLOSE = {"bf16": 5e-2, "f32": 1e-4}


def norm(h, style):
    scale, shift, gate = style.chunk(3, -1)
    y = h.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return (y * (1 + scale.float()) + shift.float()).to(h.dtype), gate


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def begin(x, t, w):
    dtype = w["time_in"].dtype
    count = w["time_in"].shape[1] // 2
    fraction = torch.linspace(0, 1, count, dtype=torch.float64, device=x.device)
    angle = t * (2 * math.pi) / (4e-3 * (4.0 / 4e-3) ** fraction)
    embedding = torch.cat((angle.sin(), angle.cos())).to(dtype)[None]
    hidden = silu(linear(embedding, w["time_in"], w["time_in_bias"]))
    cond = silu(linear(hidden, w["time_out"], w["time_out_bias"]))
    return cond, linear(x.to(dtype), w["action_in"], w["action_in_bias"])


def layer(h, cond, w, keys, values, cos, sin):
    s, head_dim = h.shape[0], keys.shape[1]
    y, gate = norm(h, linear(cond, w["style1"], w["style1_bias"]))
    q = rotate(linear(y, w["q_proj"]).view(s, -1, head_dim).transpose(0, 1), cos, sin)
    k = torch.cat((keys, rotate(linear(y, w["k_proj"]), cos, sin))).expand(q.shape[0], -1, -1)
    v = torch.cat((values, linear(y, w["v_proj"]))).expand(q.shape[0], -1, -1)
    attended = attention(q[None], k[None], v[None])[0].transpose(0, 1).reshape(s, -1)
    h = h + gate * linear(attended, w["o_proj"])
    y, gate = norm(h, linear(cond, w["style2"], w["style2_bias"]))
    hidden = gelu(linear(y, w["gate_proj"]), approximate="tanh") * linear(y, w["up_proj"])
    return h + gate * linear(hidden, w["down_proj"])


def end(h, cond, w):
    y, _ = norm(h, linear(cond, w["final_style"], w["final_style_bias"]))
    return linear(y, w["action_out"], w["action_out_bias"]).float()


EAGER = (begin, layer, end)


def velocity(x, t, parts, outer, layers, cos, sin):
    begin, layer, end = parts
    cond, h = begin(x, t, outer)
    for w, keys, values in layers:
        h = layer(h, cond, w, keys, values, cos, sin)
    return end(h, cond, outer)


def problem(s, p, steps, dtype, outer, layers, x):
    """The computation with those weights; `layers` holds each layer's, with its keys and values.

    `steps` is None for one velocity.
    """
    outer = {name: tensor.to(dtype) for name, tensor in outer.items()}
    layers = [
        ({name: w.to(dtype) for name, w in ws.items()}, keys.to(dtype), values.to(dtype))
        for ws, keys, values in layers
    ]
    head_dim = layers[0][1].shape[1]
    position = torch.arange(p, p + s, device=DEVICE, dtype=torch.float64)
    exponent = -torch.arange(0, head_dim, 2, device=DEVICE, dtype=torch.float64) / head_dim
    turn = position[:, None] * 1e4**exponent
    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
    now = torch.full((), STEP_TIME, device=DEVICE, dtype=torch.float64)

    def run(parts):
        if steps is None:
            return velocity(x, now, parts, outer, layers, cos, sin)
        state, t, dt = x, torch.ones((), device=DEVICE, dtype=torch.float64), -1 / steps
        for _ in range(steps):
            state = state + dt * velocity(state, t, parts, outer, layers, cos, sin)
            t = t + dt
        return state

    return run


@functools.cache
def weights(model, dtype):
    """Weights, `[out, in]` as `linear` takes them: those outside the layers, and each layer's."""
    width, depth, mlp, heads, head_dim = MODELS[model]
    torch.manual_seed(0)

    def matrix(into, out, gain=1.0):
        return (torch.randn(out, into, device=DEVICE) * gain / math.sqrt(into)).to(dtype)

    def bias(out):
        return (torch.randn(out, device=DEVICE) * 0.1).to(dtype)

    outer = {}
    for name, into, out, gain in (
        ("time_in", width, width, 1.0),
        ("time_out", width, width, 1.0),
        ("action_in", ACTION, width, 1.0),
        ("final_style", width, 3 * width, 2.0),
        ("action_out", width, ACTION, 1.0),
    ):
        outer[name], outer[name + "_bias"] = matrix(into, out, gain), bias(out)
    layers = [
        {
            "style1": matrix(width, 3 * width, 2.0),
            "style1_bias": bias(3 * width),
            "q_proj": matrix(width, heads * head_dim, 2.0),
            "k_proj": matrix(width, head_dim),
            "v_proj": matrix(width, head_dim),
            "o_proj": matrix(heads * head_dim, width),
            "style2": matrix(width, 3 * width, 2.0),
            "style2_bias": bias(3 * width),
            "gate_proj": matrix(width, mlp),
            "up_proj": matrix(width, mlp),
            "down_proj": matrix(mlp, width),
        }
        for _ in range(depth)
    ]
    return outer, layers


@functools.lru_cache(maxsize=1)
def made(model, s, p, steps, dtype):
    """A problem and what it gives in fp32."""
    outer, layers = weights(model, dtype)
    head_dim = MODELS[model][4]
    cache = lambda: torch.randn(p, head_dim, device=DEVICE).to(dtype)
    layers = [(ws, cache(), cache()) for ws in layers]
    x = torch.randn(s, ACTION, device=DEVICE)
    expected = problem(s, p, steps, torch.float32, outer, layers, x)(EAGER)
    return problem(s, p, steps, dtype, outer, layers, x), expected


@functools.cache
def compiled(mode):
    """The parts, compiled anew for each shape that they meet."""
    # The limit has had two names; past it a function runs eagerly, or not at all.
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    return tuple(torch.compile(part, mode=mode, dynamic=False, fullgraph=True) for part in EAGER)


def check(name, dtype, actual, expected):
    error, most = (actual - expected).norm() / expected.norm(), (actual - expected).abs().max()
    found = f"relative L2 {error.item():.1e} from fp32"
    print(f"{name}: max {most.item():.1e}, {found}", file=sys.stderr)
    if not error.item() <= CLOSE[dtype]:
        raise ValueError(f"wrong: {found}, {CLOSE[dtype]:.0e} allowed")


def peers(workload, axes):
    if workload not in ("denoise/step", "denoise/loop"):
        return
    s, dtype = int(axes["s"]), axes["dtype"]
    if dtype not in common.DTYPES:  # fp8: PyTorch has no such GEMM of bf16 activations
        return
    steps = int(axes["steps"]) if workload == "denoise/loop" else None
    make = functools.partial(made, axes["model"], s, int(axes["p"]), steps, common.DTYPES[dtype])

    def eager():
        run, expected = make()
        check("torch/eager", dtype, run(EAGER), expected)
        return lambda: run(EAGER)

    def graphed(name, parts):
        run, expected = make()
        graph, out = common.captured(lambda: run(parts))
        graph.replay()
        check(name, dtype, out, expected)
        return graph.replay

    def compiled_graph(name, mode, seconds):
        run, _ = make()
        parts = compiled(mode)
        with common.within(seconds):
            run(parts)
        return graphed(name, parts)

    yield "torch/eager", "one kernel an operation", eager
    graph = lambda: graphed("torch/cuda_graph", EAGER)
    yield "torch/cuda_graph", "the kernels of torch/eager in one CUDA graph", graph
    default = lambda: compiled_graph("torch/compile", "default", common.COMPILE_SECONDS)
    yield "torch/compile", "torch.compile of a layer, all in one CUDA graph", default
    if s >= 16:
        mode = "max-autotune-no-cudagraphs"
        tuned = lambda: compiled_graph("torch/compile_tuned", mode, TUNING_SECONDS)
        yield "torch/compile_tuned", f"the same in mode {mode}", tuned


common.main(peers)
