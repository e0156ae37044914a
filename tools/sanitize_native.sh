#!/usr/bin/env bash
# Builds the native kernels with the address and undefined-behaviour sanitizers and runs their tests under them, with
# every SIMD target this machine has. Usage: tools/sanitize_native.sh [pytest arguments]; PYTHON picks the interpreter,
# TARGETS the SIMD targets to build ("baseline;avx2"; all of the architecture if empty).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

ATTNPROOF_REQUIRE_NATIVE=1 "$PYTHON" -m pip install --quiet --no-deps --target "$tree/package" . \
  -C build-dir="$tree/build" -C cmake.build-type=Debug -C cmake.define.ATTNPROOF_SANITIZE=ON \
  -C cmake.define.ATTNPROOF_TARGETS="${TARGETS:-}"
# the interpreter below a virtual environment, with the environment's packages on its path: an editable install of this
# package would come before any path
site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PYTHON=$("$PYTHON" -c 'import sys; print(sys._base_executable)')

# the interpreter itself is not instrumented, so the runtime comes first; Python's own arenas look like leaks
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export LD_PRELOAD PYTHONPATH=$tree/package:$site ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc
"$PYTHON" - "$tree" <<'CHECK'
import sys
from attnproof.backends.native import loader
if not loader.kernels().__file__.startswith(sys.argv[1]):
    sys.exit(f"sanitizers: expected the instrumented extension, got {loader.kernels().__file__}")
CHECK
if [ $# -eq 0 ]; then
  set -- tests/unit/test_native.py tests/unit/test_native_threads.py tests/parity -k "native and not memory and not ctrl_c and not 2048 and not torch"
fi
for simd in $("$PYTHON" -c "from attnproof.backends.native import loader; print(*loader.kernels().targets())"); do
  echo "sanitizers: $simd"
  # -s: a report that pytest had captured would be lost with the process
  ATTNPROOF_SIMD=$simd "$PYTHON" -m pytest -q -s -p no:cacheprovider "$@"
done
