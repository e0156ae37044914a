#!/bin/sh
# A performance gate for any CI: does HEAD compute attention wrongly, with more memory or larger errors, or slower than BASE?
#   tools/ci_gate.sh BASE [CASE]
# Leaves with 0 (nothing got worse), 1 (something did) or 3 (this machine cannot tell: run it again, or elsewhere).
set -u
base=${1:?usage: ci_gate.sh BASE [CASE]}
case=${2:-forward B1 H4 N256 D64 float32 causal}
mkdir -p reports

# right first: no time is taken of a wrong kernel
attnproof verify --quick || exit 1

# hard: what does not depend on the clock, against the baseline of this machine if there is one
attnproof measure --case "$case" --json reports/now.json || exit 1
if [ -d .attnproof/baselines ]; then
    attnproof baseline compare reports/now.json
    [ $? -eq 1 ] && exit 1
fi

# paired: both revisions side by side, with what the machine cannot tell from nothing printed first
attnproof regress "$base..HEAD" --case "$case" --json reports/regress.json
