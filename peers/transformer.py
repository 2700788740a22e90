"""The language model in PyTorch: forward pass and training step.

Peers: eager, compiled, and compiled with the whole step in one CUDA graph.

The same equations as the workload, as a PyTorch user writes them: parameters in fp32, matmuls in
bf16 by autocast, attention by `scaled_dot_product_attention`, the fused AdamW. The eager and the
compiled step are loops, whose host time is in their time. Each peer's losses, and the gradients of
a step, are compared with the same model, eager, in fp32.

Weights are random, with the workload's standard deviations, or the workload's own: TRANSFORMER_DUMP
names a file of the same problem, with tokens, targets and the state of AdamW, written by

    kernelgate verify --bench transformer --dump FOLDER train_step/small_ctx512_b4_bf16/cuda/fused$

(without a GPU: `--backend cpu --dump FOLDER train_step/reduced_ctx64_b2_f32/cpu`). Each peer is
then also compared with the fp64 reference in the file. `python3 peers/transformer.py --check FILE`
only compares, without a GPU the eager peer alone.

A compilation in the default mode takes half a minute or more; mode max-autotune takes five minutes
for the small model and is not tried. A model of more than 24 layers is compiled block by block, all
of which share the code of one: at the small size that costs 1.5 % of a step. All compilations
together end after 300 s.
"""
import functools
import itertools
import json
import math
import os
import re
import sys

import torch
from torch import nn
from torch.nn import functional as F

import common
from transformer_sizes import SIZES

common.COMPILE_SECONDS = 300
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_LAYERS = 24  # Of a model that is compiled whole.
# Relative L2 distances of losses, and of gradients and the rest, that rounding explains, with room.
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


def arena(model, of=torch.Tensor.detach):
    """The matrices `of` the parameters, by name, as the workload stacks their rows."""
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm]
    yield "embedding", of(model.embedding.weight)
    for norm in norms:
        yield "gains", of(norm.gain)[None]
    for block in model.blocks:
        yield "qkv", of(block.qkv.weight)
        yield "out", of(block.out.weight)
        yield "gate_up", of(block.gate_up.weight)
        yield "down", of(block.down.weight).T
    yield "head", of(model.head.weight)


def load(matrices, rows):
    """Copies rows of the workload into matrices of `arena`."""
    matrices = [matrix for _, matrix in matrices]
    for matrix, values in zip(matrices, rows.split([len(matrix) for matrix in matrices])):
        matrix.copy_(values)


class Dump:
    """Inputs and reference of a problem, from a file of `kernelgate verify --dump`."""

    def __init__(self, path):
        self.path = path
        self.tensors, metadata = common.read_safetensors(path)
        self.case = metadata.get("case", "no case")

    def demand(self, problem):
        if not self.case.startswith(problem + "/"):
            raise ValueError(f"{self.path} is of {self.case}, not of {problem}")

    def __getitem__(self, name):
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def expected(self, name):
        """Numbers and values of the rows of an output that are compared, in parts."""
        if f"expected/{name}" in self.tensors:
            values = self[f"expected/{name}"].flatten(0, -2)
            return [(torch.arange(len(values)), values)]
        prefixes = (f"expected/{name}/{part}/" for part in itertools.count())
        found = itertools.takewhile(lambda prefix: prefix + "rows" in self.tensors, prefixes)
        parts = [(self[prefix + "rows"].long(), self[prefix + "values"]) for prefix in found]
        return parts or self[f"expected/{name}"]


@functools.lru_cache(maxsize=1)
def dumped():
    """The file that TRANSFORMER_DUMP names."""
    path = os.environ.get("TRANSFORMER_DUMP")
    return Dump(path) if path else None


def distance(actual, expected):
    """Relative L2 distance; infinite if it is no number."""
    relative = (actual.double() - expected).norm() / expected.double().norm()
    return relative.nan_to_num(nan=math.inf).item()


class Trained:
    """A model with its optimizer and data, in the dtype of a problem."""

    def __init__(self, axes, compiled, dump=None):
        self.dtype, context, batch = axes["dtype"], int(axes["ctx"]), int(axes["b"])
        torch.manual_seed(0)
        self.model = Model(axes["size"], context).to(DEVICE)
        vocabulary = SIZES[axes["size"]][4]
        draw = lambda: torch.randint(0, vocabulary, (batch, context), device=DEVICE)
        self.tokens, self.targets = draw(), draw()
        self.dump = dump
        if dump:
            load(arena(self.model), dump["input/parameters"])
            self.tokens = dump["input/tokens"].long().to(DEVICE)
            self.targets = dump["input/targets"].long().to(DEVICE)
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
        """Adds the optimizer, with the workload's constants, and the state of a dump."""
        if self.optimizer is not None:
            return
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True, capturable=True
        )
        if not self.dump:
            return
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            state["step"] = self.dump["input/steps"][0].to(DEVICE, copy=True)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        load(self.state("exp_avg"), self.dump["input/first_moments"])
        load(self.state("exp_avg_sq"), self.dump["input/second_moments"])

    def state(self, name):
        return arena(self.model, lambda parameter: self.optimizer.state[parameter][name])

    def check_dump(self, name, trained):
        """Compares with the fp64 reference of the dump, from its weights and state on."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.initial)
        self.optimizer = None
        if trained:
            self.train()
        logits, loss = (None, self.step()) if trained else self.forward()
        errors = {"loss": distance(loss.detach().cpu(), self.dump["expected/loss"].mean())}
        if trained:
            errors.update(self.state_errors())
        else:
            logits = logits.flatten(0, 1).cpu()
            for rows, values in self.dump.expected("logits"):
                errors["logits"] = distance(logits[rows], values[:, : logits.shape[1]])
        print(f"{name}: relative distances from the dump: {json.dumps(errors)}", file=sys.stderr)
        most_loss, most = CLOSE[self.dtype]
        if not all(error <= (most_loss if of == "loss" else most) for of, error in errors.items()):
            raise ValueError(f"wrong: relative distances from the dump of {errors}")

    def state_errors(self):
        """Distances of each kind of parameter after a step, the largest of all layers."""
        after = arena(self.model), self.state("exp_avg"), self.state("exp_avg_sq")
        after = [torch.cat([matrix.cpu() for _, matrix in matrices]) for matrices in after]
        kinds = [kind for kind, matrix in arena(self.model) for _ in matrix]
        errors = {}
        # Without what the step keeps of the old value the first moment is a tenth of the gradient.
        for name, output, kept, actual in (
            ("gradient", "first_moments", 0.9, after[1]),
            ("update", "parameters", 1.0, after[0]),
            ("weight", "parameters", 0.0, after[0]),
            ("second moment", "second_moments", 0.0, after[2]),
        ):
            for rows, values in self.dump.expected("next_" + output):
                before = kept * self.dump["input/" + output][rows].double()
                error = distance(actual[rows] - before, values - before)
                of = f"{name} of {kinds[rows[0]]}"
                errors[of] = max(error, errors.get(of, 0.0))
        return errors


@functools.lru_cache(maxsize=1)
def made(size, context, batch, dtype, compiled):
    """A model; compiled anew for each problem."""
    torch._dynamo.reset()
    return Trained({"size": size, "ctx": context, "b": batch, "dtype": dtype}, compiled, dumped())


def peers(workload, axes):
    if workload not in ("transformer/forward", "transformer/train_step"):
        return
    trained = workload == "transformer/train_step"
    torch.backends.cuda.matmul.allow_tf32 = False

    def prepare(name, compiled, graphed):
        if dumped():
            dumped().demand("{}/{size}_ctx{ctx}_b{b}_{dtype}".format(workload, **axes))
        run = made(axes["size"], axes["ctx"], axes["b"], axes["dtype"], compiled)
        once = run.gradients if trained else run.forward
        if compiled:
            with common.within(common.COMPILE_SECONDS):
                once()
        run.check(name, trained)
        if run.dump:
            run.check_dump(name, trained)
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


def check(path):
    """Compares each peer with a dump, of the problem that it is of."""
    os.environ["TRANSFORMER_DUMP"] = path
    workload = "(transformer/(?:forward|train_step))"
    found = re.match(workload + r"/(.+)_ctx(\d+)_b(\d+)_(\w+)/", dumped().case)
    if not found:
        sys.exit(f"{path} is of {dumped().case}, not of a step of the language model")
    axes = dict(zip(("size", "ctx", "b", "dtype"), found.groups()[1:]))
    for name, _, prepare in peers(found[1], axes):
        if DEVICE == "cuda" or name == "torch/eager":
            prepare()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    else:
        common.main(peers)
