#!/usr/bin/env bash
# Measures every GPU number of docs/benchmarks.md, with dummy weights.
#
#   benchmarks/gpu.sh MODELS RESULTS
#
# MODELS holds the folders qwen3-0.6b, qwen3-8b and qwen3-30b-a3b, each with a config.json. RESULTS
# gets a JSON file for each line of the table, and a text for each size of images. Needs a GPU,
# PyTorch with Triton, and msgspec, tqdm, jinja2, pyyaml and llguidance, for example on PYTHONPATH.
# PYTHON is the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
models=${1:?"usage: benchmarks/gpu.sh MODELS RESULTS"}
results=${2:?"usage: benchmarks/gpu.sh MODELS RESULTS"}
python=${PYTHON:-python3}
mkdir -p "$results"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
common=(--load-format dummy --skip-tokenizer-init --log-level warning)

measure() { # name, benchmark, model, further flags
    local name=$1 benchmark=$2 model=$3
    shift 3
    "$python" -m penstock bench "$benchmark" "${common[@]}" --model "$models/$model" "$@" \
        --json "$results/$name.json" >/dev/null
    echo "$name: done" >&2
}

# Start: once with nothing compiled before, then as on any later start.
TRITON_CACHE_DIR=$(mktemp -d) measure start_cold startup qwen3-8b --num-iters 1 --num-iters-warmup 0
measure start_warm startup qwen3-8b --num-iters 3 --num-iters-warmup 1
measure nano throughput qwen3-0.6b --workload nano --num-iters 3 --num-iters-warmup 1
measure dec1_small latency qwen3-0.6b --workload dec1 --num-iters 3
measure dec1 latency qwen3-8b --workload dec1 --num-iters 3
measure dec64 latency qwen3-8b --workload dec64 --num-iters 3
measure thr throughput qwen3-8b --workload thr --num-iters 3 --num-iters-warmup 1
measure pre throughput qwen3-8b --workload pre --num-iters 3 --num-iters-warmup 1
measure moe_dec1 latency qwen3-30b-a3b --workload dec1 --num-iters 3
measure moe_dec64 latency qwen3-30b-a3b --workload dec64 --num-iters 3
measure moe_thr throughput qwen3-30b-a3b --workload thr --num-iters 3 --num-iters-warmup 1
measure moe_pre throughput qwen3-30b-a3b --workload pre --num-iters 3 --num-iters-warmup 1
for size in 448 1024; do # Qwen2.5-VL-7B's shapes
    "$python" benchmarks/gpu_vision.py --size "$size" >"$results/vision_$size.txt"
    echo "vision_$size: done" >&2
done
"$python" benchmarks/gpu_table.py "$results"
