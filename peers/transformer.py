"""The language model in PyTorch: forward pass and training step.

Peers: eager, compiled, and compiled with the whole step in one CUDA graph.

The same equations as the workload, as a PyTorch user writes them: parameters in fp32, matmuls in
bf16 by autocast, attention by `scaled_dot_product_attention`, the fused AdamW. The eager and the
compiled step are loops, whose host time is in their time. Weights are random, with the workload's
standard deviations. Each peer's losses, and the gradients of a step, are compared with the same
model, eager, in fp32.

A compilation in the default mode takes half a minute or more; mode max-autotune takes five minutes
for the small model and is not tried. A model of more than 24 layers is compiled block by block, all
of which share the code of one: at the small size that costs 1.5 % of a step. All compilations
together end after 300 s.
"""
import functools
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import common
from transformer_sizes import SIZES

common.COMPILE_SECONDS = 300
DEVICE = "cuda"
MOST_LAYERS = 24  # Of a model that is compiled whole.
# Relative L2 distances of losses and gradients from fp32 that rounding explains, with room.
CLOSE = {"bf16": (2e-3, 6e-2), "f32": (1e-4, 2e-3)}


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.gain.to(x.dtype), 1e-5)


def rotate(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, width, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, size, context):
        super().__init__()
        width, hidden, layers, heads, vocabulary = SIZES[size]
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        head_dim = width // heads
        wavelength = 1e4 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        turn = torch.arange(context, dtype=torch.float64)[:, None] * wavelength
        self.register_buffer("cos", turn.cos().float())
        self.register_buffer("sin", turn.sin().float())
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.1)
            else:
                std = 1.0 if "embedding" in name else 1 / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens, targets):
        """Logits, and the mean loss of all tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Trained:
    """A model with its optimizer and data, in the dtype of a problem."""

    def __init__(self, axes, compiled):
        self.dtype, context, batch = axes["dtype"], int(axes["ctx"]), int(axes["b"])
        torch.manual_seed(0)
        self.model = Model(axes["size"], context).to(DEVICE)
        vocabulary = SIZES[axes["size"]][4]
        draw = lambda: torch.randint(0, vocabulary, (batch, context), device=DEVICE)
        self.tokens, self.targets = draw(), draw()
        self.call = self.model
        if compiled and len(self.model.blocks) > MOST_LAYERS:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        elif compiled:
            self.call = torch.compile(self.model, dynamic=False)
        self.optimizer = None
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]

    def autocast(self):
        lowered = self.dtype != "f32"
        return torch.autocast(DEVICE, torch.bfloat16, enabled=lowered, cache_enabled=False)

    def forward(self):
        with torch.no_grad(), self.autocast():
            return self.call(self.tokens, self.targets)

    def gradients(self):
        self.model.zero_grad(set_to_none=False)
        with self.autocast():
            _, loss = self.call(self.tokens, self.targets)
        loss.backward()
        return loss

    def step(self):
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def check(self, name, trained):
        """Compares losses, and gradients where it is trained, with the model in fp32, untrained."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.initial)
        found = self.gradients().item() if trained else self.forward()[1].item()
        compared = [self.model.blocks[0].qkv.weight, self.model.head.weight]
        actual = [weight.grad.clone() for weight in compared] if trained else []
        dtype, call = self.dtype, self.call
        self.dtype, self.call = "f32", self.model
        with torch.compiler.set_stance("force_eager"):
            expected = self.gradients().item() if trained else self.forward()[1].item()
        errors = [abs(found - expected) / abs(expected)]
        for weight, gradient in zip(compared, actual):
            errors.append(((gradient - weight.grad).norm() / weight.grad.norm()).item())
        self.dtype, self.call = dtype, call
        print(f"{name}: relative distances from fp32 of loss, gradients: {errors}", file=sys.stderr)
        loss, gradient = CLOSE[dtype]
        if not (errors[0] <= loss and all(error <= gradient for error in errors[1:])):
            raise ValueError(f"wrong: relative distances from fp32 of {errors}")

    def train(self):
        """Adds the optimizer, with the workload's constants."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True, capturable=True
            )


@functools.lru_cache(maxsize=1)
def made(size, context, batch, dtype, compiled):
    """A model; compiled anew for each problem."""
    torch._dynamo.reset()
    return Trained({"size": size, "ctx": context, "b": batch, "dtype": dtype}, compiled)


def peers(workload, axes):
    if workload not in ("transformer/forward", "transformer/train_step"):
        return
    trained = workload == "transformer/train_step"
    torch.backends.cuda.matmul.allow_tf32 = False

    def prepare(name, compiled, graphed):
        run = made(axes["size"], axes["ctx"], axes["b"], axes["dtype"], compiled)
        once = run.gradients if trained else run.forward
        if compiled:
            with common.within(common.COMPILE_SECONDS):
                once()
        run.check(name, trained)
        if not trained:
            return common.captured(run.forward)[0].replay if graphed else run.forward
        run.train()
        return common.captured(run.step)[0].replay if graphed else run.step

    for name, about, compiled, graphed in (
        ("torch/eager", "bf16 autocast, fused AdamW, a loop", False, False),
        ("torch/compile", "the same by torch.compile, a loop", True, False),
        ("torch/compile_graph", "torch.compile, all in one CUDA graph", True, True),
    ):
        yield name, about, functools.partial(prepare, name, compiled, graphed)


if __name__ == "__main__":
    common.main(peers)
