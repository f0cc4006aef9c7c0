#!/bin/sh
# Run the scan of shrinking memory (tests/offload/test_limits.py) with torch's kernels for CPUs
# without vector units, for AVX2, and for this machine: no result depends on the CPU.
#
#   sh scripts/cpu_capabilities.sh              the fast tier, about a minute a capability
#   sh scripts/cpu_capabilities.sh -m "" -n 2   each operation that takes memory at one chunk of 23
#                                               tokens, and a part of them at chunks of 5, 23 and 45
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
for capability in default avx2 ""; do
    if [ -n "$capability" ]; then
        export ATEN_CPU_CAPABILITY="$capability"
    else
        unset ATEN_CPU_CAPABILITY
    fi
    "$python" -c 'import torch; print("torch uses", torch.backends.cpu.get_cpu_capability())'
    "$python" -m pytest -q tests/offload/test_limits.py "$@"
done
