#!/usr/bin/env bash
# Builds the C++ library for 64-bit ARM on another machine and checks NEON against the portable code
# in an emulator. Needs Debian's g++-aarch64-linux-gnu, cmake and qemu-user.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../../../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S "$project" -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DSKBUILD=2 -DSKBUILD_STATE=wheel > "$build/log"
cmake --build "$build" --parallel
aarch64-linux-gnu-g++ -std=c++17 -O1 -ffp-contract=off -I "$project/penstock/ops/cpu/csrc" \
    "$here/compare_isas.cpp" "$build/libpenstock_cpu.so" -o "$build/compare_isas"
check() { qemu-aarch64 "$@" -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$build" "$build/compare_isas"; }
check
check -cpu cortex-a53 | grep -x 'the best instruction set here: portable'  # has no dot products
