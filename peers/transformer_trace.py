"""Records the language model with PyTorch's profiler, as the profiling guide does.

    python3 peers/transformer_trace.py FOLDER [SIZE [CONTEXT [LAYERS]]]

`inference.json.gz` has a forward pass, `training.json.gz` a step: ranges `forward`, `backward` and
`optimizer`, and in each layer `scaled_dot_product_attention` with `computing_attention_scores`,
`computing_softmax` and `final_matmul`. Attention is the guide's, in operations of their own.
`host.json` has the time of each by the host's timer, without the profiler.
"""
import json
import math
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import transformer

BATCH = 4


def attend(q, k, v, is_causal):
    """As the guide writes it: softmax from its operations."""
    with record_function("scaled_dot_product_attention"):
        with record_function("computing_attention_scores"):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            positions = torch.arange(q.shape[-2], device=q.device)
            scores = torch.where(positions[:, None] >= positions, scores, -math.inf)
        with record_function("computing_softmax"):
            powers = torch.exp(scores - scores.amax(-1, keepdim=True))
            probabilities = powers / powers.sum(-1, keepdim=True)
        with record_function("final_matmul"):
            return probabilities.to(v.dtype) @ v


def main(folder, size="small", context=512, layers=None):
    width, hidden, own_layers, heads, vocabulary = transformer.SIZES[size]
    transformer.SIZES[size] = (width, hidden, int(layers or own_layers), heads, vocabulary)
    transformer.F.scaled_dot_product_attention = attend
    run = transformer.Trained({"size": size, "ctx": context, "b": BATCH, "dtype": "bf16"}, False)
    run.train()

    def inference():
        with record_function("forward"):
            return run.forward()

    def training():
        run.model.zero_grad(set_to_none=False)
        with record_function("forward"), run.autocast():
            _, loss = run.call(run.tokens, run.targets)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            run.optimizer.step()

    host_ms = {}
    for step in (inference, training):
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        times = []
        for _ in range(10):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        host_ms[step.__name__] = sorted(times)[len(times) // 2]
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, record_shapes=True) as profiler:
            step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(f"{folder}/{step.__name__}.json.gz")
    with open(f"{folder}/host.json", "w") as file:
        json.dump(host_ms, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
