#!/usr/bin/env bash
# Creates or updates the virtual environment. Usage: tools/environment.sh run|test
#   run   what `make verify` needs: torch, the report, the real model
#   test  that, and linters, documentation, test tools and Triton (for the offline compile tests)
# Reads PYTHON, VENV, TORCH (see the Makefile). Safe to repeat, safe after an interrupted run.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:-run}
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=${TORCH-torch==2.13.0}

say() { printf 'environment: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v "$PYTHON" >/dev/null || fail "$PYTHON not found: install Python 3.10 or newer, or set PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$PYTHON" --version): Python 3.10 or newer is needed, set PYTHON"

# Debian and Ubuntu split venv and the headers off the interpreter; root gets them, others get the sentence
has_venv() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }
has_headers() { "$PYTHON" -c 'import pathlib, sys, sysconfig as s; sys.exit(not pathlib.Path(s.get_paths()["include"], "Python.h").exists())'; }
name=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
missing=()
has_venv || missing+=("$name-venv")
has_headers || missing+=("$name-dev")
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null \
      || say "could not install ${missing[*]}"
  else
    say "missing: apt-get install ${missing[*]} (without the headers the native backend is left out)"
  fi
fi
has_venv || fail "$PYTHON has no venv module: apt-get install $name-venv"

# an environment that was moved, or whose interpreter was removed, cannot be mended in place
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  say "creating $VENV with $("$PYTHON" --version)"
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip install -qq "$@"; }

# torch first and by name: everything after it then finds its need met and cannot pull another one
if [ -n "$TORCH" ]; then
  say "$TORCH"
  pip "$TORCH"
fi
case $level in
  run) extras=torch,report,real ;;
  test) extras=torch,triton,report,real,test,dev,docs ;;
  *) fail "level: expected run or test, got $level" ;;
esac
say "attnproof[$extras]"
pip --editable ".[$extras]"
"$VENV/bin/python" -c 'import attnproof; print("environment: backends", ", ".join(attnproof.backends()))' >&2
