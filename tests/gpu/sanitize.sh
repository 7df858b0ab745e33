#!/bin/sh
# The tests of kernels under compute-sanitizer: memory accesses, races in shared memory, barriers.
#     tests/gpu/sanitize.sh [PYTHON]
# Exit status 0: nothing was found, 77: nothing was checked, anything else: see what is printed.
# Has not been run yet: it needs a GPU. initcheck is left out, as pages are handed out uninitialised on purpose.
cd "$(dirname "$0")/../.." || exit 1
python=${1:-python3}
tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$tool" ]; then
    echo 'NOT CHECKED: compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin'
    exit 77
fi
# Without torch's cache each tensor is an allocation of its own: what is written behind its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
run="$tool --target-processes application-only --error-exitcode 99"
if ! $run "$python" -c 'import torch; print(torch.zeros(8, device="cuda").sum().item())'; then
    echo "NOT CHECKED: $tool does not work with this GPU, driver or machine"
    exit 77
fi
failed=
check() {
    echo "== $1"
    $run --tool "$1" "$python" -m pytest -q tests/gpu/test_kernels_against_reference.py -k "$2" || failed="$failed $1"
}
check memcheck 'not 7168 and (int8 or bfloat16)'
# These look at what threads of one program share.
check racecheck '1000 and (int8 or bfloat16)'
check synccheck '1000 and (int8 or bfloat16)'
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
