#!/usr/bin/env bash
# Builds the native kernels with the address and undefined-behaviour sanitizers and runs their tests under them, with
# every SIMD target this machine has. Usage: tools/sanitize_native.sh [pytest arguments]; PYTHON picks the interpreter,
# TARGETS the SIMD targets to build ("baseline;avx2"; all of the architecture if empty).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

cmake -S . -B "$tree/build" -DPython_EXECUTABLE="$(command -v "$PYTHON")" -DATTNPROOF_SANITIZE=ON \
  -DATTNPROOF_TARGETS="${TARGETS:-}" -DCMAKE_BUILD_TYPE=Debug >/dev/null
cmake --build "$tree/build" --parallel "$(getconf _NPROCESSORS_ONLN)"
# a copy of the package with the instrumented extension: the checkout keeps its own
cp -r src/attnproof "$tree/attnproof"
rm -f "$tree"/attnproof/backends/native/_kernels*.so
cp "$tree"/build/_kernels*.so "$tree/attnproof/backends/native/"

# the interpreter itself is not instrumented, so the runtime comes first; Python's own arenas look like leaks
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export LD_PRELOAD PYTHONPATH=$tree ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc
if [ $# -eq 0 ]; then
  set -- tests/unit/test_native.py tests/parity -k "native and not memory and not ctrl_c and not 2048 and not torch"
fi
for simd in $("$PYTHON" -c "from attnproof.backends.native import loader; print(*loader.kernels().targets())"); do
  echo "sanitizers: $simd"
  # -s: a report that pytest had captured would be lost with the process
  ATTNPROOF_SIMD=$simd "$PYTHON" -m pytest -q -s -p no:cacheprovider "$@"
done
