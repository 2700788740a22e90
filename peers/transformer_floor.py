"""The least time of a step of the language model on this GPU, by size.

    python3 peers/transformer_floor.py measure > floor.json
    python3 peers/transformer_floor.py table floor.json

`measure` times every GEMM of a forward pass and of its gradients by PyTorch's `matmul`, with
cuBLAS and with cuBLASLt, of which the faster counts; causal attention by
`scaled_dot_product_attention`, forward and backward, with FlashAttention and cuDNN; and passes
over as many bytes as AdamW and each remaining operation must move: a copy, a sum with a number, and
a sum of two tensors where at least two thirds are read, of which the fastest counts. `table` adds
them up: a floor of operations that run one after the other, each as fast as the library or memory
allows.

Every time is of launches in a CUDA graph in the steady state, as the peers' are. All of them take
about three minutes.
"""
import json
import sys

from transformer_sizes import SIZES

BATCH = 4
# Sizes and contexts of the table.
PROBLEMS = [
    ("small", 512),
    ("small", 1024),
    ("medium", 512),
    ("large", 512),
    ("xl", 1024),
    ("2.7B", 512),
]
LAUNCHES = 10  # In a graph, so that events do not count.
# Elements; a larger pass has the rate of this one.
LARGEST_PASS = 1 << 30
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def gemms(size, context):
    """(phase, name, count, m, n, k) of D[m, n] = A·B with k products each."""
    d, ff, layers, _, vocabulary = SIZES[size]
    tokens = BATCH * context
    for name, count, columns, k in (
        ("qkv", layers, 3 * d, d),
        ("out", layers, d, d),
        ("gate_up", layers, 2 * ff, d),
        ("down", layers, d, ff),
        ("head", 1, vocabulary, d),
    ):
        yield FORWARD, name, count, tokens, columns, k
        yield BACKWARD, f"{name}, gradient of the input", count, tokens, k, columns
        yield BACKWARD, f"{name}, gradient of the weight", count, columns, k, tokens


def moved(size, context):
    """(phase, name, count, bytes read, bytes written) of operations that only move memory."""
    d, ff, layers, _, vocabulary = SIZES[size]
    tokens = BATCH * context
    parameters = (2 * vocabulary + 2 * layers + 1 + layers * (4 * d + 3 * ff)) * d
    f32, bf16 = 4 * tokens, 2 * tokens
    norms = 2 * layers + 1
    yield FORWARD, "embedding", 1, bf16 * d, f32 * d
    yield FORWARD, "norm", norms, f32 * d, bf16 * d
    yield FORWARD, "rotary embedding", layers, bf16 * 2 * d, bf16 * 2 * d
    yield FORWARD, "SwiGLU", layers, bf16 * 2 * ff, bf16 * ff
    yield FORWARD, "residual", 2 * layers, f32 * d, f32 * d - bf16 * d
    yield FORWARD, "cross entropy", 1, bf16 * vocabulary, 0
    yield BACKWARD, "cross entropy, gradient", 1, 0, bf16 * vocabulary
    yield BACKWARD, "norm, gradient", norms, (2 * f32 + bf16) * d, (f32 + bf16) * d
    yield BACKWARD, "rotary embedding, gradient", layers, bf16 * 2 * d, bf16 * 2 * d
    yield BACKWARD, "SwiGLU, gradient", layers, bf16 * 3 * ff, bf16 * 2 * ff
    yield BACKWARD, "embedding, gradient", 1, f32 * d, 4 * vocabulary * d
    yield OPTIMIZER, "AdamW", 1, 14 * parameters, 14 * parameters


def measure():
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import common

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}

    def median_ns(launch):
        graph, _ = common.captured(lambda: [launch() for _ in range(LAUNCHES)])
        return common.steady(graph.replay)["median_ns"] / LAUNCHES

    def fastest(candidates):
        """(name, ns) of the fastest that runs."""
        times = {}
        for name, launch in candidates:
            try:
                times[name] = median_ns(launch)
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                torch.cuda.synchronize()
        return min(times.items(), key=lambda of: of[1])

    def gemm(name, m, n, k):
        # As PyTorch lays them out: x·Wᵀ, dy·W, dyᵀ·x.
        if "input" in name:
            a, b = torch.randn(m, k, **bf16), torch.randn(k, n, **bf16)
        elif "weight" in name:
            a, b = torch.randn(k, m, **bf16).t(), torch.randn(k, n, **bf16)
        else:
            a, b = torch.randn(m, k, **bf16), torch.randn(n, k, **bf16).t()
        out = torch.empty(m, n, **bf16)

        def launch(library):
            torch.backends.cuda.preferred_blas_library(library)
            torch.matmul(a, b, out=out)

        libraries = ("cublas", "cublaslt")
        return fastest((of, lambda of=of: launch(of)) for of in libraries)

    def attention(heads, context, head_dim):
        q, k, v = (
            torch.randn(BATCH, heads, context, head_dim, requires_grad=True, **bf16)
            for _ in range(3)
        )
        grad = torch.randn_like(q)
        backends = {
            "FlashAttention": SDPBackend.FLASH_ATTENTION,
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
        }

        def forward(backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(backend):
            torch.autograd.grad(forward(backend), (q, k, v), grad)

        with torch.no_grad():
            ahead = fastest((name, lambda of=of: forward(of)) for name, of in backends.items())
        whole = fastest((name, lambda of=of: both(of)) for name, of in backends.items())
        return ahead, (whole[0], max(whole[1] - ahead[1], 0.0))

    def passes(read, written):
        count = (read + written) // 4
        passed = min(count, LARGEST_PASS)
        f32 = {"device": "cuda", "dtype": torch.float32}
        # A third, for two inputs and an output of as many bytes in all.
        a, b = torch.zeros(passed // 2, **f32), torch.zeros(passed - passed // 2, **f32)
        third = passed // 3
        inputs, output = (a[:third], b[:third]), torch.zeros(third, **f32)
        candidates = [
            ("copy", lambda: b[: a.numel()].copy_(a)),
            ("sum with a number", lambda: torch.add(a, 1.0, out=b[: a.numel()])),
        ]
        if read >= 2 * written:
            candidates.append(("sum of two", lambda: torch.add(*inputs, out=output)))
        name, ns = fastest(candidates)
        return name, ns * (count / passed)

    load = torch.randn(8192, 8192, **bf16)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    peak_ns = median_ns(lambda: torch.matmul(load, load))
    measured = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "batch": BATCH,
        "square_gemm_flops_per_s": 2 * 8192**3 / peak_ns * 1e9,
        "problems": [],
    }
    del load
    for size, context in PROBLEMS:
        operations = []
        for phase, name, count, m, n, k in gemms(size, context):
            library, ns = gemm(name, m, n, k)
            operations.append(
                dict(phase=phase, kind="gemm", name=name, count=count, m=m, n=n, k=k, by=library, ns=ns)
            )
        d, _, layers, heads, _ = SIZES[size]
        causal = 2 * BATCH * context * context * d
        for phase, (by, ns), flops in zip(
            (FORWARD, BACKWARD), attention(heads, context, d // heads), (causal, 5 * causal // 2)
        ):
            name = "attention" if phase == FORWARD else "attention, gradient"
            operations.append(
                dict(phase=phase, kind="attention", name=name, count=layers, flops=flops, by=by, ns=ns)
            )
        for phase, name, count, read, written in moved(size, context):
            by, ns = passes(read, written)
            operations.append(
                dict(
                    phase=phase,
                    kind="bytes",
                    name=name,
                    count=count,
                    read=read,
                    written=written,
                    by=by,
                    ns=ns,
                )
            )
        torch.cuda.empty_cache()
        measured["problems"].append(dict(size=size, context=context, operations=operations))
    print(json.dumps(measured, indent=1))


def flops(operation):
    if operation["kind"] == "gemm":
        return 2 * operation["m"] * operation["n"] * operation["k"]
    return operation.get("flops", 0)


def bytes_moved(operation):
    return operation.get("read", 0) + operation.get("written", 0)


def table(path):
    with open(path) as file:
        measured = json.load(file)
    print(
        "| size, context | GEMMs | at | attention | at | AdamW | at | rest | forward floor | step floor | without AdamW |"
    )
    print("|---" + "|---:" * 10 + "|")
    for problem in measured["problems"]:
        operations = problem["operations"]

        def total(keep):
            kept = [of for of in operations if keep(of)]
            ns = sum(of["count"] * of["ns"] for of in kept)
            work = sum(of["count"] * flops(of) for of in kept)
            moved = sum(of["count"] * bytes_moved(of) for of in kept)
            return ns, work, moved

        ms = lambda ns: f"{ns / 1e6:.2f} ms"
        rate = lambda ns, work: f"{work / ns / 1e3:.0f} TFLOP/s"
        gemm_ns, gemm_flops, _ = total(lambda of: of["kind"] == "gemm")
        attention_ns, attention_flops, _ = total(lambda of: of["kind"] == "attention")
        adam_ns, _, adam_bytes = total(lambda of: of["phase"] == OPTIMIZER)
        rest_ns, _, _ = total(lambda of: of["kind"] == "bytes" and of["phase"] != OPTIMIZER)
        forward_ns, _, _ = total(lambda of: of["phase"] == FORWARD)
        cells = [
            f"{problem['size']}, {problem['context']}",
            ms(gemm_ns),
            rate(gemm_ns, gemm_flops),
            ms(attention_ns),
            rate(attention_ns, attention_flops),
            ms(adam_ns),
            f"{adam_bytes / adam_ns / 1e3:.2f} TB/s",
            ms(rest_ns),
            ms(forward_ns),
            ms(gemm_ns + attention_ns + adam_ns + rest_ns),
            ms(gemm_ns + attention_ns + rest_ns),
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure()
    elif sys.argv[1:2] == ["table"] and len(sys.argv) == 3:
        table(sys.argv[2])
    else:
        sys.exit(__doc__)
