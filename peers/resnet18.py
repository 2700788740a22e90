"""An ST-BIF ResNet-18 in PyTorch, inference and training step.

Peers: eager in fp32 with TF32 convolutions; the same in a CUDA graph; and what a good user would
write: channels-last bf16, convolutions over all time steps at once, bias, residual and neurons in
one kernel, the stem once an image, all in a CUDA graph; once with the kernel that `torch.compile`
makes, once in Triton (`resnet18_triton.py`), which is ready in seconds where the compiler takes
minutes. Inference with SpikingJelly's neurons, which have no backward pass, where it is installed.
A training step is the forward pass, cross-entropy, backward by replay, SGD with momentum.

The same equations as the workload. Timed peers take the weights of the safetensors file that
RESNET18_DUMP names, written by `kernelgate verify --dump`; without it random ones, drawn as the
workload's are but not the same numbers. `python resnet18.py --check DUMP stem=… w=… t=… level=…`
computes the problem of such a file with its weights and images by every kind of peer, and prints
how far the logits, and in training loss and new momentum, are from the file's; it exits with 1 if
one in fp32 is not near, as all are with dyadic weights. `--profile
WORKLOAD AXIS=VALUE…` times the peer in Triton and prints where its time goes. `--cpu B T` times a
training step on the host.
"""
import functools
import json
import math
import os
import sys
import time

import torch
from torch.nn import functional as F

import common

CLASSES, SIDE, COLORS = 10, 32, 3
MOMENTUM, LEARNING_RATE = 0.9, 0.1


def layers(stem, width):
    """(name, in, out, kernel, stride, taps that read a pixel) of every convolution."""
    convs, side = [], SIDE

    def conv(name, into, out, kernel, stride):
        after = -(-side // stride)
        axis = sum(
            0 <= at * stride + tap - kernel // 2 < side
            for at in range(after)
            for tap in range(kernel)
        )
        convs.append((name, into, out, kernel, stride, (axis / after) ** 2))
        return after

    side = conv("conv1", COLORS, width, *((7, 2) if stem == "imagenet" else (3, 1)))
    if stem == "imagenet":
        side = -(-side // 2)
    channels = width
    for stage in range(4):
        for block in range(2):
            stride, out = 2 if stage and not block else 1, width << stage
            name = f"layer{stage + 1}.{block}"
            before, into = side, channels
            side = conv(f"{name}.conv1", into, out, 3, stride)
            conv(f"{name}.conv2", out, out, 3, 1)
            if (side, out) != (before, into):
                after, side = side, before
                conv(f"{name}.downsample", into, out, 1, stride)
                side = after
            channels = out
    return convs


def random_weights(stem, width):
    """Weights `[out, in, kernel, kernel]` and biases by name."""
    torch.manual_seed(0)
    weights = {}
    for name, into, out, kernel, _, taps in layers(stem, width):
        gain = 1.0 if name == "conv1" else 2.2 if name.endswith("conv1") else 1.3
        deviation = gain / math.sqrt(taps * into)
        weights[name + ".weight"] = deviation * torch.randn(out, into, kernel, kernel)
        shift = -0.1 if name.endswith("conv2") else 0.0
        weights[name + ".bias"] = 0.1 * torch.randn(out) + shift
    weights["fc.weight"] = torch.randn(CLASSES, 8 * width) / math.sqrt(8 * width)
    weights["fc.bias"] = 0.1 * torch.randn(CLASSES)
    return weights


def loaded_weights(flat, stem, width):
    """The same out of the workload's flat parameters, channels innermost."""
    weights, at, flat = {}, 0, flat.flatten()

    def take(*shape):
        nonlocal at
        count = math.prod(shape)
        at += count
        return flat[at - count : at].reshape(shape).clone()

    for name, into, out, kernel, _, _ in layers(stem, width):
        weights[name + ".weight"] = take(out, kernel, kernel, into).permute(0, 3, 1, 2).contiguous()
        weights[name + ".bias"] = take(out)
    weights["fc.weight"], weights["fc.bias"] = take(CLASSES, 8 * width), take(CLASSES)
    if not 0 <= flat.numel() - at < width:
        raise ValueError(f"{flat.numel()} parameters, not those of {stem} with a width of {width}")
    return weights


def spikes_of(x, theta, top):
    """`[T, ...]` currents to spikes, the state in fp32."""
    v = torch.full_like(x[0], 0.5 * theta, dtype=torch.float32)
    c = torch.zeros_like(v)
    spikes = []
    for current in x.unbind(0):
        h = v + current.float()
        s = ((h >= theta) & (c < top)).float() - ((h < 0) & (c > 0)).float()
        v, c = h - theta * s, c + s
        spikes.append(s.to(x.dtype))
    return torch.stack(spikes)


def bell(z, width):
    return torch.exp(z * z / (-2 * (0.405 * width) ** 2)) / width


def currents_gradient(x, gy, theta, top):
    """Replays the forward, then reverses: gradient of the currents from that of the spikes."""
    v = torch.full_like(x[0], 0.5 * theta, dtype=torch.float32)
    c = torch.zeros_like(v)
    factors = []
    for current in x.unbind(0):
        h = v + current.float()
        a = bell(h - theta, theta) * (c < top) + bell(h, theta) * (c > 0)
        b = -((h >= theta) * bell(top - c, 1.0) + (h < 0) * bell(c, 1.0))
        factors.append((a, b))
        s = ((h >= theta) & (c < top)).float() - ((h < 0) & (c > 0)).float()
        v, c = h - theta * s, c + s
    grad_v, grad_c = torch.zeros_like(v), torch.zeros_like(v)
    gradients = []
    for (a, b), g in zip(factors[::-1], gy.unbind(0)[::-1]):
        m = g.float() - theta * grad_v + grad_c
        grad_v, grad_c = grad_v + m * a, grad_c + m * b
        gradients.append(grad_v.to(x.dtype))
    return torch.stack(gradients[::-1])


def layer_forward(y, bias, residual, fed, theta, top, keep, sums):
    """Currents, if they are kept, and values, or their sums over time, of a convolution's output
    `[T, pixels, C]` with what a step adds."""
    x = y + bias * (torch.arange(y.shape[0], device=y.device) < fed).to(y.dtype).view(-1, 1, 1)
    if residual is not None:
        x = x + residual
    values = theta * spikes_of(x, theta, top)
    return x if keep else None, values.cumsum(0) if sums else values


def spikingjelly_forward(nodes, y, bias, residual, fed, theta, top, keep, sums):
    """The same by SpikingJelly's neurons, whose states are those of `y`'s dtype; one node of `nodes`
    for all layers."""
    from spikingjelly.activation_based import functional
    from spikingjelly.activation_based.neuron.spikezip import STBIFNode

    if not nodes:
        node = STBIFNode(theta, 2 * top + 2, pos_max=top, neg_min=0, step_mode="m")
        nodes.append(node.to(y.device))
    functional.reset_net(nodes[0])
    x = y + bias * (torch.arange(y.shape[0], device=y.device) < fed).to(y.dtype).view(-1, 1, 1)
    if residual is not None:
        x = x + residual
    values = nodes[0](x)
    return x if keep else None, values.cumsum(0) if sums else values


def layer_backward(x, gy, theta, top, sums):
    """Gradient of the currents from that of the values, or of their sums."""
    if sums:
        gy = gy.flip(0).cumsum(0).flip(0)
    return currents_gradient(x, theta * gy, theta, top)


class Neurons(torch.autograd.Function):
    """`[T, pixels, C]` to values, or their sums; nothing is saved but the currents."""

    forward_kernel = staticmethod(layer_forward)
    backward_kernel = staticmethod(layer_backward)

    @staticmethod
    def forward(ctx, y, bias, residual, fed, theta, top, keep, sums):
        arguments = y, bias, residual, fed, theta, top, keep, sums
        x, values = Neurons.forward_kernel(*arguments)
        if keep:
            ctx.save_for_backward(x)
        ctx.parameters, ctx.fed, ctx.joined = (theta, top, sums), fed, residual is not None
        return values

    @staticmethod
    def backward(ctx, gy):
        (x,) = ctx.saved_tensors
        gx = Neurons.backward_kernel(x, gy.contiguous(), *ctx.parameters)
        return gx, gx[: ctx.fed].sum((0, 1)), gx if ctx.joined else None, *[None] * 5


def by_step(frames, t):
    """Frames `[T·B, C, H, W]` as `[T, B·H·W, C]`: a view of those that are channels-last."""
    return frames.permute(0, 2, 3, 1).reshape(t, -1, frames.shape[1])


class Network:
    """The network with its weights on a device, in a dtype."""

    def __init__(self, stem, width, t, level, weights, device, dtype, train=False):
        self.stem, self.t = stem, t
        self.steps = level // 2 - 1
        self.fed, self.top, self.theta = min(t, self.steps), self.steps, 4.0 / level
        self.dtype, self.train = dtype, train
        last = lambda w: torch.channels_last if w.dim() == 4 else torch.preserve_format
        move = lambda w, dtype: w.to(device, dtype, memory_format=last(w))
        self.master = {name: move(w, torch.float32) for name, w in weights.items()}
        if train:
            self.master = {name: w.requires_grad_() for name, w in self.master.items()}
        self.convs = {name: conv for name, *conv in layers(stem, width)}
        # Training rounds the parameters in every step, inference once.
        self.packed = None if train else {name: self.round(name, dtype) for name in self.master}

    def round(self, name, dtype):
        """A weight as convolutions take it, a bias as a step adds it, with that of the shortcut."""
        value = self.master[name].to(dtype)
        if name.endswith(".weight"):
            return value
        shortcut = name.replace("conv2", "downsample")
        if shortcut != name and shortcut in self.master:
            value = value + self.master[shortcut].to(dtype)
        return value / self.steps

    def weight(self, name):
        return self.packed[name] if self.packed else self.round(name, self.dtype)

    def convolve(self, name, x):
        _, _, kernel, stride, _ = self.convs[name]
        return F.conv2d(x, self.weight(name + ".weight"), stride=stride, padding=kernel // 2)

    def neurons(self, y, name, residual=None, sums=False):
        frames, channels, rows, columns = y.shape
        if residual is not None:
            residual = by_step(residual, self.t)
        rest = self.fed, self.theta, self.top, self.train, sums
        values = Neurons.apply(by_step(y, self.t), self.weight(name + ".bias"), residual, *rest)
        return values.view(frames, rows, columns, channels).permute(0, 3, 1, 2)

    def pool(self, sums):
        """Telescoped: of the sums over time, then what a step adds."""
        pooled = F.max_pool2d(sums, 3, 2, 1)
        frames, channels, rows, columns = pooled.shape
        by = by_step(pooled, self.t)
        steps = torch.cat((by[:1], by[1:] - by[:-1]))
        return steps.view(frames, rows, columns, channels).permute(0, 3, 1, 2)

    def __call__(self, images):
        once = self.convolve("conv1", images.to(self.dtype)) / self.steps
        feeds = (torch.arange(self.t, device=images.device) < self.fed).to(self.dtype)
        x = (once[None] * feeds.view(-1, 1, 1, 1, 1)).flatten(0, 1)
        pooling = self.stem == "imagenet"
        value = self.neurons(x, "conv1", sums=pooling)
        if pooling:
            value = self.pool(value)
        for block in [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]:
            hidden = self.neurons(self.convolve(block + ".conv1", value), block + ".conv1")
            y = self.convolve(block + ".conv2", hidden)
            if block + ".downsample" in self.convs:
                value = self.convolve(block + ".downsample", value)
            value = self.neurons(y, block + ".conv2", value)
        features = value.unflatten(0, (self.t, -1)).float().sum(0).mean((-2, -1))
        share = self.fed / self.steps
        return F.linear(features, self.master["fc.weight"], share * self.master["fc.bias"])


def trained(network, images, labels):
    """What computes a training step; parameters and momenta move on with every call."""
    parameters = list(network.master.values())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def captured(run):
    """What replays it as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay():
        graph.replay()
        return run  # Holds what the graph reads.

    return replay


def use_kernels(kind):
    """Makes all networks compute their neurons so."""
    kernels = layer_forward, layer_backward
    if kind == "compiled":
        # One kernel for all layers' extents: a compilation an extent takes minutes.
        torch._dynamo.config.recompile_limit = 64
        kernels = [torch.compile(kernel, dynamic=True) for kernel in kernels]
    elif kind == "triton":
        import resnet18_triton as by_triton

        kernels = by_triton.forward, by_triton.backward
    elif kind == "spikingjelly":
        kernels = functools.partial(spikingjelly_forward, []), layer_backward
    Neurons.forward_kernel, Neurons.backward_kernel = map(staticmethod, kernels)


def prepare(workload, axes, graph, kernels=None):
    """What launches a problem: in fp32, also with neurons by `spikingjelly`, or in bf16 with neurons
    `compiled` or in `triton`."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    b, t, level, width = (int(axes[axis]) for axis in ("b", "t", "level", "w"))
    train = workload.endswith("train_step")
    dtype = torch.bfloat16 if kernels in ("compiled", "triton") else torch.float32
    dump = os.environ.get("RESNET18_DUMP")
    if dump:
        flat = common.read_safetensors(dump)[0]["input/parameters"]
        weights = loaded_weights(flat, axes["stem"], width)
    else:
        weights = random_weights(axes["stem"], width)
    network = Network(axes["stem"], width, t, level, weights, "cuda", dtype, train)
    images = torch.randn(b, COLORS, SIDE, SIDE, device="cuda")
    labels = torch.randint(CLASSES, (b,), device="cuda")
    if kernels:
        images = images.contiguous(memory_format=torch.channels_last)
    use_kernels(kernels)
    if train:
        run = trained(network, images, labels)
    else:
        def run():
            with torch.no_grad():
                return network(images)
    return captured(run) if graph else run


def peers(workload, axes):
    if not workload.startswith("resnet18/"):
        return
    eager = "fp32 with TF32, neurons a loop over time"
    yield "torch/eager", eager, lambda: prepare(workload, axes, False)
    yield "torch/graph", eager + ", CUDA graph", lambda: prepare(workload, axes, True)
    about = "channels-last bf16, CUDA graph, neurons "
    yield "torch/triton", about + "in Triton", lambda: prepare(workload, axes, True, "triton")
    yield "torch/compiled", about + "compiled", lambda: prepare(workload, axes, True, "compiled")
    if workload == "resnet18/inference":
        about = "channels-last fp32 with TF32, CUDA graph, SpikingJelly's neurons"
        yield "spikingjelly", about, lambda: prepare(workload, axes, True, "spikingjelly")


# How far a check in fp32 may be off: the library may multiply in TF32, which has dyadic weights and
# images exactly, but not gradients.
MOST_APART = {"logits": 1e-4, "loss": 1e-4, "new_momentum": 1e-2}


def check(path, axes):
    """Prints how far each kind of peer is from the outputs in the file, in every dtype; whether all
    of those in fp32 are near enough, with dyadic weights. Without a GPU, those that need none."""
    found, _ = common.read_safetensors(path)
    cuda = torch.cuda.is_available()
    kinds = ["eager", "spikingjelly"] + ["graph", "triton", "compiled"] * cuda
    near = True
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            line = {"kind": kind, "dtype": str(dtype)}
            try:
                apart = distances(found, axes, kind, dtype, "cuda" if cuda else "cpu")
                if dtype == torch.float32:
                    near &= all(value <= MOST_APART[name] for name, value in apart.items())
                line.update(apart)
            except Exception as error:  # A kind that cannot is a line, and not near.
                line["error"] = (str(error).strip() or repr(error)).splitlines()[0]
                near &= isinstance(error, ImportError) or dtype != torch.float32
            print(json.dumps(line), flush=True)
    return near


def distances(found, axes, kind, dtype, device):
    """Relative L2 distance of logits and, if the file is of a training step and the kind trains, of
    the worst new momentum, and the loss's absolute one."""
    tensor = lambda name: found.get("input/" + name, found.get("output/" + name))
    t, level, width = (int(axes[axis]) for axis in ("t", "level", "w"))
    train = "output/new_momentum" in found and kind != "spikingjelly"
    weights = loaded_weights(tensor("parameters"), axes["stem"], width)
    images = tensor("images").permute(0, 3, 1, 2).to(device)
    network = Network(axes["stem"], width, t, level, weights, device, dtype, train)
    use_kernels(None if kind in ("eager", "graph") else kind)
    labels = tensor("labels").long().to(device) if train else None
    last = {}

    def run():
        with torch.set_grad_enabled(train):
            last["logits"] = network(images)
            if train:
                for weight in network.master.values():
                    weight.grad = None
                last["loss"] = F.cross_entropy(last["logits"], labels)
                last["loss"].backward()

    # As it is timed: all but `eager` in a graph, which computes once more what it captured.
    run = run if kind == "eager" or device == "cpu" else captured(run)
    run()
    relative = lambda a, b: ((a.double().cpu() - b.double()).norm() / b.double().norm()).item()
    apart = {"logits": relative(last["logits"].detach(), tensor("logits"))}
    if train:
        old = loaded_weights(tensor("momentum"), axes["stem"], width)
        new = loaded_weights(tensor("new_momentum"), axes["stem"], width)
        momentum = lambda name, weight: MOMENTUM * old[name] + weight.grad.cpu()
        worst = max(relative(momentum(*of), new[of[0]]) for of in network.master.items())
        loss = abs(last["loss"].item() - tensor("loss").item())
        apart.update(loss=loss, new_momentum=worst)
    return apart


CONVOLUTIONS = ("conv", "cudnn", "xmma", "cutlass", "dgrad", "wgrad", "fprop", "gemm", "nvjet")


def profiled(launch):
    """Time of a launch, and by PyTorch's profiler its kernels and where their time goes."""
    line = common.steady(launch)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        launch()
        torch.cuda.synchronize()
    kernels = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in kernels)
    by_name, busy, convolutions, until = {}, 0.0, 0.0, spans[0][0]
    for start, end, name in spans:
        by_name[name] = by_name.get(name, 0.0) + end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        if any(word in name.lower() for word in CONVOLUTIONS):
            convolutions += end - start
    span = until - spans[0][0]
    line.update(kernels=len(spans), span_us=span, idle=1 - busy / span)
    line.update(convolutions=convolutions / busy)
    line["slowest"] = sorted(((t, name[:80]) for name, t in by_name.items()), reverse=True)[:12]
    return line


def time_host(b, t):
    """Prints the median time of a training step on the host."""
    weights = random_weights("imagenet", 64)
    network = Network("imagenet", 64, t, 8, weights, "cpu", torch.float32, True)
    images = torch.randn(b, COLORS, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    step = trained(network, images, torch.randint(CLASSES, (b,)))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    print(json.dumps({"b": b, "t": t, "threads": threads, "median_s": sorted(times)[4]}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        near = check(sys.argv[2], dict(axis.split("=") for axis in sys.argv[3:]))
        sys.exit(0 if near else 1)
    elif sys.argv[1:2] == ["--profile"]:
        axes = {"stem": "imagenet", "w": 64, "b": 32, "t": 8, "level": 8}
        axes.update(axis.split("=") for axis in sys.argv[3:])
        print(json.dumps(profiled(prepare(sys.argv[2], axes, True, "triton"))))
    elif sys.argv[1:2] == ["--cpu"]:
        time_host(int(sys.argv[2]), int(sys.argv[3]))
    else:
        common.main(peers)
